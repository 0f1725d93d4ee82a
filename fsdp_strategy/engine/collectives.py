"""The one seam to `torch.distributed`: gathering, reducing, agreeing. One class per way of doing it.

`GlooCollectives` sends point to point, straight from the shard into place, and sums reductions locally in rank order:
gloo's own all-gather copies through a temporary and its reduce-scatter is an all-reduce and a slice.
`NativeCollectives` uses the backend's all-gather and reduce-scatter (NCCL, and any other backend in tests).

An operation is bound once to the buffers of a span and then started every step. Starting enqueues; a pending result may
be read after `wait()`. The caller keeps one order of starts on all ranks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_strategy.engine.cut import Cut
from fsdp_strategy.engine.layout import MessagePolicy, SpanLayout
from fsdp_strategy.engine.operations import GatherOp, LocalGather, LocalReduce, Pending, ReduceOp

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


class GlooGather(GatherOp):
    """Point-to-point sends from the shard and receives into place."""

    def __init__(self, layout: SpanLayout, unsharded: Tensor, groups: OneWayGroups, tag: int) -> None:
        super().__init__(layout, unsharded)
        self._groups, self._tag = groups, tag
        self._peers = [peer for peer in range(layout.shard_world_size) if peer != layout.shard_rank]
        self._receives = [
            (unsharded.narrow(0, m.starts[peer], m.numels[peer]), peer, tag + i)
            for i, m in enumerate(layout.direct)
            for peer in self._peers
            if m.numels[peer]
        ]
        own = [m.numels[layout.shard_rank] for m in layout.direct]
        packed = layout.packed.piece_numels[layout.shard_rank] if layout.packed else 0
        self.num_messages = len(self._peers) * (sum(numel > 0 for numel in own) + (packed > 0))

    def start(self, shard: Tensor) -> Pending:
        """Send this rank's pieces to every peer and receive theirs."""
        groups, tag, layout = self._groups, self._tag, self.layout
        own = self._own_pieces(shard)
        pending = Pending(
            [groups.receive(view, peer, message) for view, peer, message in self._receives],
            keep_alive=[shard],
        )
        for i, piece in enumerate(own):
            if piece.numel():
                pending.sends += [groups.send(piece, peer, tag + i) for peer in self._peers]
        if layout.packed is not None:
            self._start_packed(shard, pending, tag + len(own))
        if own:
            torch._foreach_copy_(self._own, own)
        return pending

    def _start_packed(self, shard: Tensor, pending: Pending, tag: int) -> None:
        packed = self.layout.packed
        assert packed is not None
        pieces = shard.new_empty(sum(packed.piece_numels))
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
    """All-to-all from where autograd left the gradients, and a local sum in rank order (bit for bit repeatable)."""

    def __init__(
        self, layout: SpanLayout, *, reduce_dtype: torch.dtype, device: torch.device, groups: OneWayGroups, tag: int
    ) -> None:
        super().__init__(layout, reduce_dtype=reduce_dtype, device=device)
        self._groups, self._tag = groups, tag
        self._peers = [peer for peer in range(layout.shard_world_size) if peer != layout.shard_rank]
        for peer in self._peers:
            numels = [m.numels[peer] for m in layout.direct]
            numels += [layout.packed.piece_numels[peer]] if layout.packed else []
            self.sent_numel += sum(numels)
            self.num_messages += sum(numel > 0 for numel in numels)
        self.buffer_numel = layout.shard_world_size * layout.shard_numel

    def start(self, grads: Sequence[Tensor | None]) -> Pending:
        """Send every peer its rows and receive this rank's rows from every peer."""
        layout, rank = self.layout, self.layout.shard_rank
        rows = torch.empty(
            layout.shard_world_size, layout.shard_numel, dtype=self.reduce_dtype, device=self._device
        )  # (N, shard_numel) reduce_dtype
        for row in rows:
            self._zero_gaps(row)
        pending = Pending([], keep_alive=[rows], finish=lambda: _sum_rows(rows))
        for i, m in enumerate(layout.direct):
            flat = self._flat(grads[m.param], m.param)
            pieces = [
                flat.narrow(0, start - layout.starts[m.param], numel)
                for start, numel in zip(m.starts, m.numels, strict=True)
            ]
            self._exchange(pieces, rows.narrow(1, m.shard_start, m.numels[rank]), pending, self._tag + i)
        if layout.packed is not None:
            packed = layout.packed
            pieces = list(torch.split_with_sizes(self._copy_in(grads), packed.piece_numels))
            into = rows.narrow(1, packed.shard_start, packed.piece_numels[rank])
            self._exchange(pieces, into, pending, self._tag + len(layout.direct))
        return pending

    def _exchange(self, pieces: list[Tensor], into: Tensor, pending: Pending, tag: int) -> None:
        """Start one message to and from every peer; `into` is (N, own_numel)."""
        groups, rank = self._groups, self.layout.shard_rank
        into[rank].copy_(pieces[rank])
        for peer in self._peers:
            if into.size(1):
                pending.works.append(groups.receive(into[peer], peer, tag))
            if pieces[peer].numel():
                pending.sends.append(groups.send(pieces[peer], peer, tag))
        pending.keep_alive += pieces


def _sum_rows(rows: Tensor) -> Tensor:
    """Sum over ranks in rank order, in place of the first row."""
    total = rows[0]
    for row in rows[1:]:
        total.add_(row)
    return total


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
        packed = self.layout.packed
        if packed is not None:
            pieces = shard.new_empty(sum(packed.piece_numels))
            pending.works.append(_all_gather(pieces, self._packed_piece(shard), group=self._group, async_op=True))
            pending.finish = lambda: self._copy_out(pieces)
        return pending


class NativeReduce(ReduceOp):
    """The backend's reduce-scatter: sums, in the backend's order."""

    def __init__(
        self, layout: SpanLayout, *, reduce_dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(layout, reduce_dtype=reduce_dtype, device=device)
        self._group = group
        self.num_messages = len(layout.direct) + (layout.packed is not None)
        pieces = [m.numels[0] for m in layout.direct]
        pieces += [layout.packed.piece_numels[0]] if layout.packed else []
        self.sent_numel = (layout.shard_world_size - 1) * sum(pieces)

    def start(self, grads: Sequence[Tensor | None]) -> Pending:
        """Enqueue the reduce-scatters; they wait for the work queued on the current stream."""
        total = torch.empty(self.layout.shard_numel, dtype=self.reduce_dtype, device=self._device)
        self._zero_gaps(total)
        pending = Pending([], keep_alive=[total], finish=lambda: total)
        jobs = [
            (total.narrow(0, m.shard_start, m.numels[0]), self._flat(grads[m.param], m.param))
            for m in self.layout.direct
        ]
        packed = self.layout.packed
        if packed is not None:
            into = total.narrow(0, packed.shard_start, packed.piece_numels[0])
            jobs.append((into, self._copy_in(grads)))
        for into, source in jobs:
            pending.works.append(_reduce_scatter(into, source, group=self._group, async_op=True))
            pending.keep_alive.append(source)
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

    def bind_reduce(self, layout: SpanLayout, *, reduce_dtype: torch.dtype, device: torch.device) -> ReduceOp:
        """The reduction of a span's gradients, accumulated in `reduce_dtype`."""
        if self.shard_world_size == 1:
            return LocalReduce(layout, reduce_dtype=reduce_dtype, device=device)
        return self._make_reduce(layout, reduce_dtype=reduce_dtype, device=device)

    @abstractmethod
    def _make_gather(self, layout: SpanLayout, unsharded: Tensor) -> GatherOp: ...

    @abstractmethod
    def _make_reduce(self, layout: SpanLayout, *, reduce_dtype: torch.dtype, device: torch.device) -> ReduceOp: ...

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
        self._next_tag = 1

    def _take_tags(self, layout: SpanLayout) -> int:
        tag = self._next_tag
        self._next_tag += len(layout.direct) + 1
        return tag

    def _make_gather(self, layout: SpanLayout, unsharded: Tensor) -> GatherOp:
        return GlooGather(layout, unsharded, self._gathers, self._take_tags(layout))

    def _make_reduce(self, layout: SpanLayout, *, reduce_dtype: torch.dtype, device: torch.device) -> ReduceOp:
        tag = self._take_tags(layout)
        return GlooReduce(layout, reduce_dtype=reduce_dtype, device=device, groups=self._reductions, tag=tag)


class NativeCollectives(Collectives):
    """The backend's own collectives, with equal pieces and padding in the packed message."""

    policy = MessagePolicy(equal_pieces=True)

    def _make_gather(self, layout: SpanLayout, unsharded: Tensor) -> GatherOp:
        return NativeGather(layout, unsharded, self.gather_group)

    def _make_reduce(self, layout: SpanLayout, *, reduce_dtype: torch.dtype, device: torch.device) -> ReduceOp:
        return NativeReduce(layout, reduce_dtype=reduce_dtype, device=device, group=self.reduce_group)
