"""Who owns which elements: pure arithmetic, no process group, no device.

A unit's parameters of one dtype form a *span*: one shard buffer on every rank and one region of the unit's unsharded
storage. `plan_span` decides where every parameter lies in both, which parameters travel on their own (`DirectMessage`,
gathered straight into place) and which share one message (`PackedMessage`: too small, or not divisible where the
collective wants equal pieces).

All offsets and counts are in elements of the span, unless the name says `nbytes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Every unsharded parameter starts at a cache line: unaligned weight gradients are slower to write, and collective
# payloads off 16 bytes leave NCCL's fast path.
ALIGN_NBYTES = 64

# Below this size a message of its own costs more in calls than the copies of the packed one.
DIRECT_MIN_NBYTES = 64 * 1024


def shard_bounds(dim0: int, shard_world_size: int, shard_rank: int) -> tuple[int, int]:
    """Half-open row range that the rank owns, as `torch.chunk` cuts it. Trailing ranks may own nothing."""
    chunk = -(-dim0 // shard_world_size)
    return min(shard_rank * chunk, dim0), min((shard_rank + 1) * chunk, dim0)


def align(numel: int, itemsize: int) -> int:
    """`numel` rounded up to a whole number of `ALIGN_NBYTES`."""
    step = max(1, ALIGN_NBYTES // itemsize)
    return -(-numel // step) * step


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
class ParamSpec:
    """Shape and memory order of one unsharded parameter; `stride` is dense with dim 0 outermost.

    Elements of a complex parameter count as pairs of real ones. A 0-d parameter is replicated: every rank owns it.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_complex: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every rank owns the whole parameter."""
        return not self.shape

    @property
    def dim0(self) -> int:
        """Rows."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Real elements of one row."""
        return math.prod(self.shape[1:]) * (2 if self.is_complex else 1)

    @property
    def numel(self) -> int:
        """Real elements, unsharded."""
        return self.dim0 * self.row_numel

    def bounds(self, shard_world_size: int, shard_rank: int) -> tuple[int, int]:
        """Half-open row range that the rank owns."""
        return (0, 1) if self.is_replicated else shard_bounds(self.dim0, shard_world_size, shard_rank)

    def view_rows(self, flat: Tensor, start: int, num_rows: int) -> Tensor:
        """`num_rows` rows as a tensor over `flat`, a 1-D real buffer in which they begin at `start`."""
        shape = (num_rows, *self.shape[1:]) if self.shape else ()
        if not self.is_complex:
            return flat.as_strided(shape, self.stride, flat.storage_offset() + start)
        pairs = (*(2 * step for step in self.stride), 1)
        return torch.view_as_complex(flat.as_strided((*shape, 2), pairs, flat.storage_offset() + start))


@dataclass(frozen=True, slots=True)
class DirectMessage:
    """One parameter gathered straight into place; rank r holds `[starts[r], starts[r] + numels[r])` of the span."""

    param: int  # index into the span's parameters
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

    params: tuple[ParamSpec, ...]
    starts: tuple[int, ...]  # per parameter, in the unsharded span
    shard_starts: tuple[int, ...]  # per parameter, in this rank's shard buffer
    shard_rows: tuple[tuple[int, int], ...]  # per parameter, the rows of this rank
    unsharded_numel: int  # with alignment
    shard_numel: int  # with alignment
    direct: tuple[DirectMessage, ...]
    packed: PackedMessage | None
    shard_world_size: int
    shard_rank: int

    @property
    def numel(self) -> int:
        """Elements of all parameters, without alignment."""
        return sum(spec.numel for spec in self.params)

    def shard_param_numel(self, param: int) -> int:
        """Elements of the parameter that this rank owns."""
        first, last = self.shard_rows[param]
        return (last - first) * self.params[param].row_numel

    def sent_numel(self) -> int:
        """Elements that this rank sends in one gather: its shard to every other rank."""
        return (self.shard_world_size - 1) * self.payload_numel()

    def payload_numel(self) -> int:
        """Elements that this rank contributes, as they travel."""
        own = sum(message.numels[self.shard_rank] for message in self.direct)
        return own + (self.packed.piece_numels[self.shard_rank] if self.packed else 0)


def _is_direct(spec: ParamSpec, itemsize: int, shard_world_size: int, policy: MessagePolicy) -> bool:
    if shard_world_size == 1:
        return True  # no message at all: the shard is the parameter
    if spec.is_replicated or spec.numel * itemsize < policy.direct_min_nbytes:
        return False
    if not policy.equal_pieces:
        return True
    return spec.dim0 % shard_world_size == 0 and (spec.numel // shard_world_size) * itemsize % 16 == 0


def _plan_packed(
    params: tuple[ParamSpec, ...], packed: list[int], shard_start: int, start: int, region: int, *,
    shard_world_size: int, policy: MessagePolicy, itemsize: int,
) -> PackedMessage:  # fmt: skip
    numels = [0] * shard_world_size
    for index in packed:
        for rank in range(shard_world_size):
            first, last = params[index].bounds(shard_world_size, rank)
            numels[rank] += (last - first) * params[index].row_numel
    pieces = [align(max(numels), itemsize)] * shard_world_size if policy.equal_pieces else numels
    return PackedMessage(tuple(packed), tuple(numels), tuple(pieces), shard_start, start, region)


def plan_span(
    params: tuple[ParamSpec, ...], itemsize: int, *, shard_world_size: int, shard_rank: int, policy: MessagePolicy
) -> SpanLayout:
    """Lay the parameters of one span out, cut along dim 0 as `torch.chunk` does.

    Args:
        params: parameters of one (real) dtype.
        itemsize: bytes of one element on the wire and in the unsharded storage.
        shard_world_size: ranks that share the span.
        shard_rank: this rank among them.
        policy: what the collectives backend asks for.
    """
    is_direct = [_is_direct(spec, itemsize, shard_world_size, policy) for spec in params]
    # Direct parameters first. Packed shards follow each other without gaps; complex ones first, so that pairs align.
    order = sorted(range(len(params)), key=lambda i: (not is_direct[i], not params[i].is_complex))
    starts, shard_starts, direct = [0] * len(params), [0] * len(params), []
    rows = [spec.bounds(shard_world_size, shard_rank) for spec in params]
    start = shard_start = 0
    packed_start = packed_shard_start = 0
    for position, index in enumerate(order):
        spec = params[index]
        if position == sum(is_direct):
            packed_start, packed_shard_start = start, shard_start
        starts[index], shard_starts[index] = start, shard_start
        own_numel = (rows[index][1] - rows[index][0]) * spec.row_numel
        if is_direct[index]:
            bounds = [spec.bounds(shard_world_size, rank) for rank in range(shard_world_size)]
            piece_starts = tuple(start + first * spec.row_numel for first, _ in bounds)
            numels = tuple((last - first) * spec.row_numel for first, last in bounds)
            direct.append(DirectMessage(index, piece_starts, numels, shard_start))
            shard_start += align(own_numel, itemsize)
        else:
            shard_start += own_numel
        start += align(spec.numel, itemsize)
    packed = None
    if not all(is_direct):
        packed = _plan_packed(
            params, order[len(direct) :], packed_shard_start, packed_start, start - packed_start,
            shard_world_size=shard_world_size, policy=policy, itemsize=itemsize,
        )  # fmt: skip
        # The padding of the piece is part of the shard buffer, so that the piece is sent without a copy.
        shard_start = packed_shard_start + packed.piece_numels[shard_rank]
    return SpanLayout(
        params=params, starts=tuple(starts), shard_starts=tuple(shard_starts), shard_rows=tuple(rows),
        unsharded_numel=start, shard_numel=align(shard_start, itemsize), direct=tuple(direct), packed=packed,
        shard_world_size=shard_world_size, shard_rank=shard_rank,
    )  # fmt: skip


def _packed_positions(layout: SpanLayout) -> list[list[Tensor]]:
    """For every packed parameter and rank the positions of its elements in the pieces, laid rank after rank."""
    packed = layout.packed
    assert packed is not None
    filled = [sum(packed.piece_numels[:rank]) for rank in range(layout.shard_world_size)]
    positions = []
    for index in packed.params:
        spec = layout.params[index]
        parts = []
        for rank in range(layout.shard_world_size):
            first, last = spec.bounds(layout.shard_world_size, rank)
            numel = (last - first) * spec.row_numel
            parts.append(torch.arange(filled[rank], filled[rank] + numel))
            filled[rank] += numel
        positions.append(parts)
    return positions


def copy_out_index(layout: SpanLayout) -> Tensor:
    """(region_numel,) int32: for each element of the packed region its place in the gathered pieces; gaps read 0."""
    packed = layout.packed
    assert packed is not None
    index = torch.zeros(packed.region_numel, dtype=torch.int32)
    for param, parts in zip(packed.params, _packed_positions(layout), strict=True):
        position = parts[layout.shard_rank] if layout.params[param].is_replicated else torch.cat(parts)
        begin = layout.starts[param] - packed.start
        index[begin : begin + position.numel()] = position.to(torch.int32)
    return index


def copy_in_index(layout: SpanLayout) -> Tensor:
    """(sum(piece_numels),) int32: for each element of the pieces its place in the packed parameters laid end to end.

    Padding reads element 0; what arrives there is never used.
    """
    packed = layout.packed
    assert packed is not None
    index = torch.zeros(sum(packed.piece_numels), dtype=torch.int32)
    begin = 0
    for param, parts in zip(packed.params, _packed_positions(layout), strict=True):
        spec = layout.params[param]
        for part in parts if spec.is_replicated else [torch.cat(parts)]:
            index[part] = torch.arange(begin, begin + spec.numel, dtype=torch.int32)
        begin += spec.numel
    return index
