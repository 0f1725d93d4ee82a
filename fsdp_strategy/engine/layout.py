"""Who owns which elements: pure arithmetic, no process group, no device.

A unit's parameters of one dtype form a *span*: one shard buffer on every rank and one region of the unit's unsharded
storage. `plan_span` decides where every parameter lies in both, which parameters travel on their own (`DirectMessage`,
gathered straight into place) and which share one message (`PackedMessage`: too small, or not divisible where the
collective wants equal pieces).

All offsets and counts are in elements of the span, unless the name says `nbytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_strategy.engine.cut import Cut, FlatCut, Layout, ParamSpec, align, cut_flat, cut_rows

# Below this size a message of its own costs more in calls than the copies of the packed one.
DIRECT_MIN_NBYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePolicy:
    """What a collectives backend asks of the messages.

    Attributes:
        equal_pieces: every rank must contribute the same number of elements to one message (native collectives).
        direct_min_nbytes: parameters of at least this size travel on their own.
    """

    equal_pieces: bool
    direct_min_nbytes: int = DIRECT_MIN_NBYTES


@dataclass(frozen=True, slots=True)
class DirectMessage:
    """What travels straight into place; rank r holds `[starts[r], starts[r] + numels[r])` of the unsharded span."""

    param: int  # the first that it carries, and the only one but for the gather of a flat span
    starts: tuple[int, ...]  # per rank, in the unsharded span
    numels: tuple[int, ...]  # per rank
    shard_start: int  # in this rank's shard buffer


@dataclass(frozen=True, slots=True)
class PackedMessage:
    """Parameters that share one message. Rank r's piece lies in one run at the end of its shard buffer."""

    params: tuple[int, ...]
    numels: tuple[int, ...]  # per rank, payload only
    piece_numels: tuple[int, ...]  # per rank, as sent: padded to the largest where equal pieces are asked for
    shard_start: int  # in this rank's shard buffer
    start: int  # first element of the packed region of the unsharded span
    region_numel: int  # with the gaps that alignment leaves


@dataclass(frozen=True, slots=True)
class SpanLayout:
    """Where the parameters of a span lie, unsharded and in this rank's shard."""

    cuts: tuple[Cut, ...]  # per parameter
    starts: tuple[int, ...]  # per parameter, in the unsharded span
    shard_starts: tuple[int, ...]  # per parameter, in this rank's shard buffer
    unsharded_numel: int  # with alignment
    shard_numel: int  # with alignment
    direct: tuple[DirectMessage, ...]
    packed: PackedMessage | None
    shard_world_size: int
    shard_rank: int
    is_whole: bool = False  # one message carries the span as it lies

    @property
    def numel(self) -> int:
        """Elements of all parameters, without alignment."""
        return sum(cut.spec.numel for cut in self.cuts)

    def shard_param_numel(self, param: int) -> int:
        """Elements of the parameter that this rank owns."""
        return self.cuts[param].numel(self.shard_rank)

    def shard_view(self, buffer: Tensor, param: int) -> Tensor:
        """This rank's shard of the parameter as a view of `buffer`, (shard_numel,)."""
        return self.cuts[param].view(buffer, self.shard_starts[param], self.shard_rank)

    def sent_numel(self) -> int:
        """Elements that this rank sends in one gather: its shard to every other rank."""
        return (self.shard_world_size - 1) * self.payload_numel()

    def payload_numel(self) -> int:
        """Elements that this rank contributes, as they travel."""
        own = sum(message.numels[self.shard_rank] for message in self.direct)
        return own + (self.packed.piece_numels[self.shard_rank] if self.packed else 0)


def _is_direct(cut: Cut, itemsize: int, policy: MessagePolicy) -> bool:
    if cut.shard_world_size == 1:
        return True  # no message at all: the shard is the parameter
    if cut.is_replicated or cut.spec.numel * itemsize < policy.direct_min_nbytes:
        return False
    if not policy.equal_pieces:
        return True
    numel, rest = divmod(cut.spec.numel, cut.shard_world_size)
    last = cut.bounds(cut.shard_world_size - 1)
    return not rest and numel * itemsize % 16 == 0 and cut.bounds(0) == (0, numel) and last[1] - last[0] == numel


def _plan_packed(
    cuts: Sequence[Cut], packed: list[int], shard_start: int, start: int, region: int, *, policy: MessagePolicy,
    itemsize: int,
) -> PackedMessage:  # fmt: skip
    numels = [sum(per_param) for per_param in zip(*(cuts[index].numels() for index in packed), strict=True)]
    pieces = [align(max(numels), itemsize)] * len(numels) if policy.equal_pieces else numels
    return PackedMessage(tuple(packed), tuple(numels), tuple(pieces), shard_start, start, region)


def plan_messages(cuts: Sequence[Cut], itemsize: int, *, shard_rank: int, policy: MessagePolicy) -> SpanLayout:
    """Lay the parameters of one span out, each with a message of its own or in the packed one.

    Args:
        cuts: of parameters of one (real) dtype.
        itemsize: bytes of one element on the wire and in the unsharded storage.
        shard_rank: this rank among those that share the span.
        policy: what the collectives backend asks for.
    """
    world = range(cuts[0].shard_world_size)
    is_direct = [_is_direct(cut, itemsize, policy) for cut in cuts]
    # Direct parameters first. Packed shards follow each other without gaps; complex ones first, so that pairs align.
    order = sorted(range(len(cuts)), key=lambda i: (not is_direct[i], not cuts[i].spec.is_complex))
    starts, shard_starts, direct = [0] * len(cuts), [0] * len(cuts), []
    start = shard_start = 0
    packed_start = packed_shard_start = 0
    for position, index in enumerate(order):
        cut = cuts[index]
        if position == sum(is_direct):
            packed_start, packed_shard_start = start, shard_start
        starts[index], shard_starts[index] = start, shard_start
        if is_direct[index]:
            bounds = [cut.bounds(rank) for rank in world]
            numels = tuple(last - first for first, last in bounds)
            direct.append(DirectMessage(index, tuple(start + first for first, _ in bounds), numels, shard_start))
            shard_start += align(numels[shard_rank], itemsize)
        else:
            shard_start += cut.numel(shard_rank)
        start += align(cut.spec.numel, itemsize)
    packed = None
    if not all(is_direct):
        packed = _plan_packed(
            cuts, order[len(direct) :], packed_shard_start, packed_start, start - packed_start,
            policy=policy, itemsize=itemsize,
        )  # fmt: skip
        # The padding of the piece is part of the shard buffer, so that the piece is sent without a copy.
        shard_start = packed_shard_start + packed.piece_numels[shard_rank]
    return SpanLayout(
        cuts=tuple(cuts), starts=tuple(starts), shard_starts=tuple(shard_starts), unsharded_numel=start,
        shard_numel=align(shard_start, itemsize), direct=tuple(direct), packed=packed,
        shard_world_size=len(world), shard_rank=shard_rank,
    )  # fmt: skip


def _plan_whole(cuts: Sequence[FlatCut], *, shard_rank: int) -> SpanLayout:
    """A flat span: one message, every rank's piece straight into place."""
    world, piece = cuts[0].shard_world_size, cuts[0].piece_numel
    begin = shard_rank * piece
    return SpanLayout(
        cuts=tuple(cuts), starts=tuple(cut.start for cut in cuts),
        shard_starts=tuple(min(max(cut.start - begin, 0), piece) for cut in cuts), unsharded_numel=world * piece,
        shard_numel=piece, direct=(DirectMessage(0, tuple(range(0, world * piece, piece)), (piece,) * world, 0),),
        packed=None, shard_world_size=world, shard_rank=shard_rank, is_whole=True,
    )  # fmt: skip


def plan_reduction(gathered: SpanLayout, trainable: Sequence[bool], itemsize: int, policy: MessagePolicy) -> SpanLayout:
    """Lay the gradients of a span's trainable parameters out.

    A flat span whose parameters are all trainable goes as a whole where pieces must be equal: one copy-in per
    parameter, however many ranks there are.

    Args:
        gathered: the layout of the span.
        trainable: of its parameters.
        itemsize: bytes of one element on the wire.
        policy: what the collectives backend asks for.
    """
    if gathered.is_whole and policy.equal_pieces and all(trainable) and gathered.shard_world_size > 1:
        return gathered
    cuts = [cut for cut, is_trainable in zip(gathered.cuts, trainable, strict=True) if is_trainable]
    return plan_messages(cuts, itemsize, shard_rank=gathered.shard_rank, policy=policy)


def plan_span(
    specs: Sequence[ParamSpec], itemsize: int, *, layout: Layout = "per_parameter", shard_world_size: int,
    shard_rank: int, policy: MessagePolicy,
) -> SpanLayout:  # fmt: skip
    """Cut the parameters of one span and lay them out for gathering. See `plan_messages` for the arguments."""
    if layout == "flat":
        return _plan_whole(cut_flat(specs, itemsize, shard_world_size), shard_rank=shard_rank)
    return plan_messages(cut_rows(specs, shard_world_size), itemsize, shard_rank=shard_rank, policy=policy)


def _places(layout: SpanLayout, index: int, begins: Tensor) -> tuple[Tensor, Tensor]:
    """For the elements of a packed parameter, rank after rank: the rank that owns each, and its place in the pieces.

    `begins`: per rank, where its shard of the parameter begins in the pieces.
    """
    numels = torch.tensor(layout.cuts[index].numels())
    owners = torch.repeat_interleave(torch.arange(layout.shard_world_size), numels)
    firsts = torch.cumsum(numels, 0) - numels
    return owners, torch.arange(owners.numel()) - firsts[owners] + begins[owners]


def _packed_places(layout: SpanLayout) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every packed parameter with the owners and places of its elements; see `_places`."""
    packed = layout.packed
    assert packed is not None
    piece_numels = torch.tensor(packed.piece_numels)
    begins = torch.cumsum(piece_numels, 0) - piece_numels
    for index in packed.params:
        owners, places = _places(layout, index, begins)
        yield index, owners, places
        begins = begins + torch.bincount(owners, minlength=layout.shard_world_size)


def copy_out_index(layout: SpanLayout) -> Tensor:
    """(region_numel,) int32: for each element of the packed region its place in the gathered pieces; gaps read 0."""
    packed = layout.packed
    assert packed is not None
    index = torch.zeros(packed.region_numel, dtype=torch.int32)
    for param, owners, places in _packed_places(layout):
        own = places[owners == layout.shard_rank] if layout.cuts[param].is_replicated else places
        begin = layout.starts[param] - packed.start
        index[begin : begin + own.numel()] = own.to(torch.int32)
    return index


def copy_in_index(layout: SpanLayout) -> Tensor:
    """(sum(piece_numels),) int32: for each element of the pieces its place in the packed parameters laid end to end.

    Padding reads element 0; what arrives there is never used.
    """
    packed = layout.packed
    assert packed is not None
    index = torch.zeros(sum(packed.piece_numels), dtype=torch.int32)
    begin = 0
    for param, _, places in _packed_places(layout):
        numel = layout.cuts[param].spec.numel
        index[places] = begin + torch.arange(places.numel(), dtype=torch.int32) % max(
            numel, 1
        )  # replicated: on every rank
        begin += numel
    return index


def copy_in_runs(layout: SpanLayout) -> list[tuple[int, int, int, int]]:
    """(param, first, numel, start): runs of the packed parameters and where they go in the pieces, rank after rank.

    In a flat span there are hardly more runs than parameters: a piece ends inside one parameter at most.
    """
    packed = layout.packed
    assert packed is not None
    runs, filled = [], 0
    for rank in range(layout.shard_world_size):
        start = filled
        for param in packed.params:
            first, last = layout.cuts[param].bounds(rank)
            if last > first:
                runs.append((param, first, last - first, start))
                start += last - first
        filled += packed.piece_numels[rank]
    return runs
