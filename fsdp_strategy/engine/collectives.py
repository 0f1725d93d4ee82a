"""The one seam to `torch.distributed`: gathering, reducing, agreeing. One class per way of doing it.

`GlooCollectives` sends point to point, straight from the shard into place, and sums reductions locally in rank order:
gloo's own all-gather copies through a temporary and its reduce-scatter is an all-reduce and a slice.
`NativeCollectives` uses the backend's all-gather and reduce-scatter (NCCL, and any other backend in tests).

An operation is bound once to the buffers of a span and then started every step. Starting enqueues; a pending result may
be read after `wait()`. The caller keeps one order of starts on all ranks.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_strategy.engine.cut import Cut
from fsdp_strategy.engine.layout import MessagePolicy, SpanLayout
from fsdp_strategy.engine.operations import GatherOp, LocalGather, LocalReduce, Pending, ReduceOp, average_into, chunks

# torch 2.13 renamed both and warns about the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class OneWayGroups:
    """Point-to-point messages over two groups: one for messages to higher ranks, one for messages to lower ranks.

    gloo locks a connection while it writes to it and spins on what arrives on it meanwhile. With a connection for each
    direction nothing arrives where this rank writes: measured, a third less system time.
    """

    def __init__(self, upward: dist.ProcessGroup, downward: dist.ProcessGroup) -> None:
        self._upward, self._downward = upward, downward
        self._rank = dist.get_rank(upward)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Start sending to a peer."""
        group = self._upward if peer > self._rank else self._downward
        return dist.isend(tensor, group=group, group_dst=peer, tag=tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Start receiving from a peer."""
        group = self._downward if peer > self._rank else self._upward
        return dist.irecv(tensor, group=group, group_src=peer, tag=tag)


def _take_tags(tags: Iterator[int], numels: Sequence[int], itemsize: int) -> list[int]:
    """A tag for every chunk of the longest piece: all ranks take the same ones. `numels`: per rank."""
    return [next(tags) for _ in chunks(max(numels), itemsize)]


class GlooGather(GatherOp):
    """Point-to-point sends from the shard and receives into place."""

    def __init__(self, layout: SpanLayout, unsharded: Tensor, groups: OneWayGroups, tags: Iterator[int]) -> None:
        super().__init__(layout, unsharded)
        self._groups, itemsize, rank = groups, unsharded.itemsize, layout.shard_rank
        self._peers = [peer for peer in range(layout.shard_world_size) if peer != rank]
        self._receives: list[tuple[Tensor, int, int]] = []
        self._sends: list[tuple[int, int, int]] = []  # start and numel in the shard, tag
        for m in layout.direct:
            own_tags = _take_tags(tags, m.numels, itemsize)
            for peer in self._peers:
                for (start, numel), tag in zip(chunks(m.numels[peer], itemsize), own_tags, strict=False):
                    self._receives.append((unsharded.narrow(0, m.starts[peer] + start, numel), peer, tag))
            for (start, numel), tag in zip(chunks(m.numels[rank], itemsize), own_tags, strict=False):
                self._sends.append((m.shard_start + start, numel, tag))
        self._packed_tag = next(tags)
        packed = layout.packed.piece_numels[rank] if layout.packed else 0
        self.num_messages = len(self._peers) * (len(self._sends) + (packed > 0))

    def start(self, shard: Tensor) -> Pending:
        """Send this rank's pieces to every peer and receive theirs."""
        groups = self._groups
        pending = Pending([groups.receive(*message) for message in self._receives], keep_alive=[shard])
        for start, numel, tag in self._sends:
            piece = shard.narrow(0, start, numel)
            pending.sends += [groups.send(piece, peer, tag) for peer in self._peers]
        if self.layout.packed is not None:
            self._start_packed(shard, pending)
        if self._own:
            torch._foreach_copy_(self._own, self._own_pieces(shard))
        return pending

    def _start_packed(self, shard: Tensor, pending: Pending) -> None:
        packed, tag = self.layout.packed, self._packed_tag
        assert packed is not None
        pieces = self._pieces(shard, pending)
        own = self._packed_piece(shard)
        for peer, into in enumerate(torch.split_with_sizes(pieces, packed.piece_numels)):
            if peer == self.layout.shard_rank:
                into.copy_(own)
                continue
            if into.numel():
                pending.works.append(self._groups.receive(into, peer, tag))
            if own.numel():
                pending.sends.append(self._groups.send(own, peer, tag))
        pending.finish = lambda: self._copy_out(pieces)


class GlooReduce(ReduceOp):
    """All-to-all from where autograd left the gradients, and a local sum in rank order (bit for bit repeatable).

    What arrives first in rank order is received where the result belongs, if it has the result's dtype; a rank's own
    gradient is added from where it is.
    """

    def __init__(self, layout: SpanLayout, *, groups: OneWayGroups, tags: Iterator[int], **dtypes: Any) -> None:
        super().__init__(layout, **dtypes)
        self._groups, rank = groups, layout.shard_rank
        self._peers = [peer for peer in range(layout.shard_world_size) if peer != rank]
        numels = [m.numels for m in layout.direct]
        numels += [layout.packed.piece_numels] if layout.packed else []
        itemsize = self.wire_dtype.itemsize
        self._tags = [_take_tags(tags, per_rank, itemsize) for per_rank in numels]
        for peer in self._peers:
            self.sent_numel += sum(per_rank[peer] for per_rank in numels)
            self.num_messages += sum(len(chunks(per_rank[peer], itemsize)) for per_rank in numels)

    def start(self, grads: Sequence[Tensor | None], into: Tensor | None = None) -> Pending:
        """Send every peer its part and receive this rank's from every peer."""
        layout, rank = self.layout, self.layout.shard_rank
        pending = Pending([])
        target = self._target(into, pending)
        sums: list[Callable[[], None]] = []
        for m, tags in zip(layout.direct, self._tags, strict=False):
            flat, begin = self._flat(grads[m.param], m.param, pending), layout.starts[m.param]
            pieces = [flat.narrow(0, s - begin, n) for s, n in zip(m.starts, m.numels, strict=True)]
            sums += self._exchange(pieces, target.narrow(0, m.shard_start, m.numels[rank]), pending, tags)
        packed = layout.packed
        if packed is not None:
            pieces = list(torch.split_with_sizes(self._copy_in(grads, pending), packed.piece_numels))
            own = target.narrow(0, packed.shard_start, packed.piece_numels[rank])
            sums += self._exchange(pieces, own, pending, self._tags[-1])

        def finish() -> Tensor:
            for add_up in sums:
                add_up()
            return target

        pending.finish = finish
        return pending

    def _exchange(
        self, pieces: list[Tensor], target: Tensor, pending: Pending, tags: list[int]
    ) -> Iterator[Callable[[], None]]:
        """Start the messages of one parameter, `pieces` to all ranks; return what adds up those that arrive."""
        itemsize, rank = self.wire_dtype.itemsize, self.layout.shard_rank
        pending.keep_alive += pieces
        for (start, numel), tag in zip(chunks(target.numel(), itemsize), tags, strict=False):
            yield self._receive_chunk(
                target.narrow(0, start, numel), pieces[rank].narrow(0, start, numel), pending, tag
            )
        for peer in self._peers:
            for (start, numel), tag in zip(chunks(pieces[peer].numel(), itemsize), tags, strict=False):
                pending.sends.append(self._groups.send(pieces[peer].narrow(0, start, numel), peer, tag))

    def _receive_chunk(self, target: Tensor, own: Tensor, pending: Pending, tag: int) -> Callable[[], None]:
        is_in_place = target.dtype == self.wire_dtype
        summands: dict[int, Tensor] = {self.layout.shard_rank: own}
        for peer in self._peers:
            if is_in_place and peer == self._peers[0]:
                summands[peer] = target
            else:
                summands[peer] = torch.empty(target.numel(), dtype=self.wire_dtype, device=self._device)
                pending.buffer_nbytes += summands[peer].nbytes
            pending.works.append(self._groups.receive(summands[peer], peer, tag))
        in_order = [summands[peer] for peer in sorted(summands)]
        num_ranks = len(in_order)
        if is_in_place:  # it holds the first summand, or the second: their sum is the same
            others = [summand for summand in in_order if summand is not target]
            return lambda: average_into(target, others, num_ranks)
        return lambda: average_into(target, in_order[1:], num_ranks, first=in_order[0])


class NativeGather(GatherOp):
    """The backend's all-gather, one call per direct parameter and one for the packed ones."""

    def __init__(self, layout: SpanLayout, unsharded: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(layout, unsharded)
        self._group = group
        self._into = [unsharded.narrow(0, m.starts[0], sum(m.numels)) for m in layout.direct]
        self.num_messages = len(layout.direct) + (layout.packed is not None)

    def start(self, shard: Tensor) -> Pending:
        """Enqueue the all-gathers; they wait for the work queued on the current stream."""
        pending = Pending([], keep_alive=[shard])
        for into, piece in zip(self._into, self._own_pieces(shard), strict=True):
            pending.works.append(_all_gather(into, piece, group=self._group, async_op=True))
        if self.layout.packed is not None:
            pieces = self._pieces(shard, pending)
            pending.works.append(_all_gather(pieces, self._packed_piece(shard), group=self._group, async_op=True))
            pending.finish = lambda: self._copy_out(pieces)
        return pending


class NativeReduce(ReduceOp):
    """The backend's reduce-scatter, in the backend's order; its all-to-all and a local sum on a narrower wire."""

    def __init__(self, layout: SpanLayout, *, group: dist.ProcessGroup, **dtypes: Any) -> None:
        super().__init__(layout, **dtypes)
        self._group = group
        self.num_messages = len(layout.direct) + (layout.packed is not None)
        pieces = [m.numels[0] for m in layout.direct]
        pieces += [layout.packed.piece_numels[0]] if layout.packed else []
        self.sent_numel = (layout.shard_world_size - 1) * sum(pieces)

    def start(self, grads: Sequence[Tensor | None], into: Tensor | None = None) -> Pending:
        """Enqueue the reduce-scatters; they wait for the work queued on the current stream."""
        num_ranks, pending = self.layout.shard_world_size, Pending([])
        target = self._target(into, pending)
        jobs: list[tuple[Tensor, Tensor]] = []
        if self.layout.is_whole:
            jobs.append((target, self._copy_in_whole(grads, pending)))
        else:
            for m in self.layout.direct:
                own = target.narrow(0, m.shard_start, m.numels[0])
                jobs.append((own, self._flat(grads[m.param], m.param, pending)))
        packed = self.layout.packed
        if packed is not None:
            own = target.narrow(0, packed.shard_start, packed.piece_numels[0])
            jobs.append((own, self._copy_in(grads, pending)))
        rows: list[Tensor] = []
        for own, source in jobs:
            pending.keep_alive.append(source)
            if self.wire_dtype == self.reduce_dtype:
                pending.works.append(_reduce_scatter(own, source, group=self._group, async_op=True))
                continue
            rows.append(torch.empty_like(source))
            pending.buffer_nbytes += source.nbytes
            pending.works.append(dist.all_to_all_single(rows[-1], source, group=self._group, async_op=True))

        def finish() -> Tensor:
            if not rows:
                return target.div_(num_ranks)
            for (own, _), received in zip(jobs, rows, strict=True):
                first, *others = received.view(num_ranks, -1)
                average_into(own, others, num_ranks, first=first)
            return target

        pending.finish = finish
        return pending


class Collectives(ABC):
    """Makes the operations of one backend over the gather, reduce and control groups."""

    policy: MessagePolicy

    def __init__(
        self,
        *,
        device: torch.device,
        gather_group: dist.ProcessGroup,
        reduce_group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
    ) -> None:
        """`device`: where tensors of gathers and reductions live."""
        self.gather_group, self.reduce_group, self.control_group = gather_group, reduce_group, control_group
        self.device = device
        self._num_meetings = 0
        self.shard_rank = dist.get_rank(gather_group)
        self.shard_world_size = dist.get_world_size(gather_group)

    def bind_gather(self, layout: SpanLayout, unsharded: Tensor) -> GatherOp:
        """The gather of a span into `unsharded`, an alias of its region of the unsharded storage."""
        if self.shard_world_size == 1:
            return LocalGather(layout, unsharded)
        return self._make_gather(layout, unsharded)

    def bind_reduce(self, layout: SpanLayout, *, reduce_dtype: torch.dtype, wire_dtype: torch.dtype) -> ReduceOp:
        """The reduction of a span's gradients, summed in `reduce_dtype` and sent in `wire_dtype`."""
        dtypes: dict[str, Any] = {"reduce_dtype": reduce_dtype, "wire_dtype": wire_dtype, "device": self.device}
        return LocalReduce(layout, **dtypes) if self.shard_world_size == 1 else self._make_reduce(layout, **dtypes)

    @abstractmethod
    def _make_gather(self, layout: SpanLayout, unsharded: Tensor) -> GatherOp: ...

    @abstractmethod
    def _make_reduce(self, layout: SpanLayout, **dtypes: Any) -> ReduceOp: ...

    def agree_max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over ranks of a small CPU tensor, in ceil(log2 N) rounds; blocks.

        Dissemination: in round k every rank hears from the rank 2^k before it. A maximum may count a rank twice.
        """
        rank, size = self.shard_rank, self.shard_world_size
        distance = 1
        while distance < size:
            heard = values.clone()
            send: Any = dist.isend(values, group=self.control_group, group_dst=(rank + distance) % size)
            receive: Any = dist.irecv(heard, group=self.control_group, group_src=(rank - distance) % size)
            receive.wait()
            send.wait()
            values = torch.maximum(values, heard)
            distance *= 2
        return values

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Overwrite the dense `tensor` with that of shard rank `src`, on every rank; blocks."""
        if self.shard_world_size > 1:
            flat = tensor.as_strided((tensor.numel(),), (1,))
            dist.broadcast(flat.view(torch.uint8), group=self.gather_group, group_src=src)

    def gather_param(self, cut: Cut, local: Tensor) -> Tensor:
        """The whole parameter, on every rank, from every rank's shard of it; outside of the training step; blocks."""
        if cut.is_replicated:
            return local.clone()
        spec = cut.spec
        full = torch.empty_strided(spec.shape, spec.stride, dtype=local.dtype, device=local.device)
        for rank in range(self.shard_world_size):
            piece = cut.piece_of(full, rank)
            if rank == self.shard_rank:
                piece.copy_(local.as_strided((local.numel(),), (1,)))
            if piece.numel():
                self.broadcast(piece, src=rank)
        return full

    def all_reduce(self, value: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """The sum or maximum of a small tensor over ranks, the same on every rank."""
        if self.shard_world_size > 1:
            value = value.clone()
            dist.all_reduce(value, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.reduce_group)
        return value

    def all_arrive(self, timeout: timedelta) -> bool:
        """Whether every rank calls this within the timeout. Goes through the store, so that no group is harmed."""
        store = dist.distributed_c10d._get_default_store()
        self._num_meetings += 1
        key = f"fsdp_strategy/{self.control_group.group_name}/{self._num_meetings}"
        deadline = time.monotonic() + timeout.total_seconds()
        num_arrived = store.add(key, 1)
        while num_arrived < self.shard_world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            num_arrived = store.add(key, 0)
        return num_arrived >= self.shard_world_size

    def exchange_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order; for setup, not for the training step."""
        values: list[Any] = [None] * self.shard_world_size
        dist.all_gather_object(values, value, group=self.control_group)
        return values

    def collect(self, piece: Tensor, numels: Sequence[int]) -> list[Tensor] | None:
        """CPU copies of every rank's 1-D `piece` on rank 0, None elsewhere. `numels` holds each rank's size; blocks."""
        piece = piece.detach().cpu().contiguous()
        if self.shard_rank != 0:
            if piece.numel():
                dist.send(piece, group=self.control_group, group_dst=0)
            return None
        pieces = [piece, *(piece.new_empty(numel) for numel in numels[1:])]
        for peer, into in enumerate(pieces):
            if peer and into.numel():
                dist.recv(into, group=self.control_group, group_src=peer)
        return pieces


class GlooCollectives(Collectives):
    """Point-to-point messages, which may have any size; tags keep messages of different spans apart."""

    policy = MessagePolicy(equal_pieces=False)

    def __init__(
        self, *, downward_groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device: torch.device, **groups: Any
    ) -> None:
        """See `Collectives`; `downward_groups` carry gathers and reductions to lower ranks."""
        super().__init__(device=device, **groups)
        self._gathers = OneWayGroups(self.gather_group, downward_groups[0])
        self._reductions = OneWayGroups(self.reduce_group, downward_groups[1])
        self._tags = itertools.count(1)

    def _make_gather(self, layout: SpanLayout, unsharded: Tensor) -> GatherOp:
        return GlooGather(layout, unsharded, self._gathers, self._tags)

    def _make_reduce(self, layout: SpanLayout, **dtypes: Any) -> ReduceOp:
        return GlooReduce(layout, groups=self._reductions, tags=self._tags, **dtypes)


class NativeCollectives(Collectives):
    """The backend's own collectives, with equal pieces and padding in the packed message."""

    policy = MessagePolicy(equal_pieces=True)

    def _make_gather(self, layout: SpanLayout, unsharded: Tensor) -> GatherOp:
        return NativeGather(layout, unsharded, self.gather_group)

    def _make_reduce(self, layout: SpanLayout, **dtypes: Any) -> ReduceOp:
        return NativeReduce(layout, group=self.reduce_group, **dtypes)
