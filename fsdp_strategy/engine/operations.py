"""What every way of gathering and reducing a span shares: copy-in, copy-out, and the single-rank case.

No communication happens here; `collectives` derives the operations that communicate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_strategy.engine.cut import FlatCut
from fsdp_strategy.engine.layout import SpanLayout, copy_in_index, copy_in_runs, copy_out_index

# No message is longer: gloo and glibc treat larger blocks worse.
MAX_MESSAGE_NBYTES = 32 * 2**20

# Sums run over blocks of this size, so that what one pass leaves is in the cache for the next.
_BLOCK_NUMEL = 256 * 1024


@dataclass(slots=True)
class Pending:
    """A started collective.

    Attributes:
        works: must be waited for before the result is read.
        sends: must be waited for before what was sent is overwritten or freed.
        finish: runs once after `works`; returns the result, if the collective has one.
        keep_alive: memory that the collective still reads or writes.
        buffer_nbytes: memory that it has allocated, until the result is there.
        input_nbytes: memory that it has allocated for what is sent, until that is sent.
    """

    works: list[Any]
    sends: list[Any] = field(default_factory=list)
    finish: Callable[[], Tensor | None] = lambda: None
    keep_alive: list[Tensor] = field(default_factory=list)
    buffer_nbytes: int = 0
    input_nbytes: int = 0

    def wait(self) -> Tensor | None:
        """Block until the result may be read on the current stream, and return it."""
        for work in self.works:
            work.wait()
        finish, self.finish = self.finish, lambda: None
        return finish()

    def wait_sent(self) -> None:
        """Block until the peers have what was sent."""
        for work in self.sends:
            work.wait()
        self.sends.clear()
        self.keep_alive.clear()


def chunks(numel: int, itemsize: int) -> list[tuple[int, int]]:
    """(start, numel) of the messages in which `numel` elements travel, none over `MAX_MESSAGE_NBYTES`."""
    most = MAX_MESSAGE_NBYTES // itemsize
    return [(start, min(most, numel - start)) for start in range(0, numel, most)]


def average_into(target: Tensor, others: Sequence[Tensor], num_ranks: int, *, first: Tensor | None = None) -> None:
    """Add 1-D tensors to `target` in their order, in its dtype, and divide by the number of ranks.

    Args:
        target: holds the first of the summands, unless `first` is given.
        others: the other summands, of any dtype.
        num_ranks: what to divide by.
        first: the first summand, where `target` holds nothing yet.
    """
    for start in range(0, target.numel(), _BLOCK_NUMEL):
        numel = min(_BLOCK_NUMEL, target.numel() - start)
        block = target.narrow(0, start, numel)
        if first is not None:
            block.copy_(first.narrow(0, start, numel))
        for other in others:
            block.add_(other.narrow(0, start, numel))
        block.div_(num_ranks)


class GatherOp(ABC):
    """The gather of one span: every rank's shard into the unsharded storage of all ranks."""

    def __init__(self, layout: SpanLayout, unsharded: Tensor) -> None:
        """Bind to `unsharded`, (unsharded_numel,), an alias of the storage with a version counter of its own."""
        self.layout = layout
        self.sent_numel = layout.sent_numel()
        self.num_messages = 0
        rank = layout.shard_rank
        self._own = [unsharded.narrow(0, m.starts[rank], m.numels[rank]) for m in layout.direct]
        self._index: Tensor | None = None
        if layout.packed is not None:
            self._packed_numel = sum(layout.packed.piece_numels)
            self._index = copy_out_index(layout).to(unsharded.device)
            self._region = unsharded.narrow(0, layout.packed.start, layout.packed.region_numel)

    @abstractmethod
    def start(self, shard: Tensor) -> Pending:
        """Enqueue the gather of `shard`, (shard_numel,) in the unsharded dtype."""

    def _pieces(self, shard: Tensor, pending: Pending) -> Tensor:
        """Where the packed pieces of all ranks arrive."""
        pieces = shard.new_empty(self._packed_numel)
        pending.buffer_nbytes += pieces.nbytes
        return pieces

    def _own_pieces(self, shard: Tensor) -> list[Tensor]:
        rank = self.layout.shard_rank
        return [shard.narrow(0, m.shard_start, m.numels[rank]) for m in self.layout.direct]

    def _packed_piece(self, shard: Tensor) -> Tensor:
        packed = self.layout.packed
        assert packed is not None
        return shard.narrow(0, packed.shard_start, packed.piece_numels[self.layout.shard_rank])

    def _copy_out(self, pieces: Tensor) -> None:
        assert self._index is not None
        torch.index_select(pieces, 0, self._index, out=self._region)


class ReduceOp(ABC):
    """The reduction of one span: the mean over ranks of every rank's gradients, each rank receiving its shard of it."""

    def __init__(
        self, layout: SpanLayout, *, reduce_dtype: torch.dtype, wire_dtype: torch.dtype, device: torch.device
    ) -> None:
        """Sum in `reduce_dtype`, send in `wire_dtype`."""
        self.layout = layout
        self.reduce_dtype, self.wire_dtype = reduce_dtype, wire_dtype
        self.sent_numel = 0
        self.num_messages = 0
        self._device = device
        self._index: Tensor | None = None
        self._runs: list[tuple[int, int, int, int]] = []
        if layout.packed is not None:
            self._packed_numel = sum(layout.packed.piece_numels)
            if isinstance(layout.cuts[0], FlatCut):
                self._runs = copy_in_runs(layout)
            else:
                self._index = copy_in_index(layout).to(device)
        self._gaps = _shard_gaps(layout)

    @abstractmethod
    def start(self, grads: Sequence[Tensor | None], into: Tensor | None = None) -> Pending:
        """Enqueue the reduction of the unsharded gradients, in the layout's order; None counts as zero.

        The pending result is the mean, (shard_numel,) `reduce_dtype`: `into`, which may be overwritten from now on and
        is zero where no parameter lies, or a buffer of its own.
        """

    def _target(self, into: Tensor | None, pending: Pending) -> Tensor:
        if into is not None:
            return into
        target = torch.empty(self.layout.shard_numel, dtype=self.reduce_dtype, device=self._device)
        for start, numel in self._gaps:
            target.narrow(0, start, numel).zero_()
        pending.buffer_nbytes += target.nbytes
        return target

    def _flat(self, grad: Tensor | None, param: int, pending: Pending) -> Tensor:
        """The gradient's elements in memory order, (numel,) `wire_dtype`, without a copy where it has that dtype."""
        flat = self._in_order(grad, param)
        if flat.dtype == self.wire_dtype:
            return flat
        pending.buffer_nbytes += flat.numel() * self.wire_dtype.itemsize
        return flat.to(self.wire_dtype)

    def _in_order(self, grad: Tensor | None, param: int) -> Tensor:
        spec = self.layout.cuts[param].spec
        if grad is None:
            return torch.zeros(spec.numel, dtype=self.wire_dtype, device=self._device)
        flat = spec.in_memory_order(grad)
        return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat

    def _copy_in_whole(self, grads: Sequence[Tensor | None], pending: Pending) -> Tensor:
        """The gradients as the span lies, (unsharded_numel,) `wire_dtype`; what is in the gaps is never used."""
        layout = self.layout
        whole = torch.empty(layout.unsharded_numel, dtype=self.wire_dtype, device=self._device)
        pending.buffer_nbytes += whole.nbytes
        places = [whole.narrow(0, s, c.spec.numel) for s, c in zip(layout.starts, layout.cuts, strict=True)]
        torch._foreach_copy_(places, [self._in_order(grad, param) for param, grad in enumerate(grads)])
        return whole

    def _copy_in(self, grads: Sequence[Tensor | None], pending: Pending) -> Tensor:
        """The packed gradients as pieces laid rank after rank, (sum(piece_numels),) `wire_dtype`."""
        packed = self.layout.packed
        assert packed is not None
        if self._index is not None:
            flats = [self._in_order(grads[param], param).to(self.wire_dtype) for param in packed.params]
            pieces = torch.cat(flats).index_select(0, self._index)
        else:
            pieces = torch.empty(self._packed_numel, dtype=self.wire_dtype, device=self._device)
            by_param = {param: self._in_order(grads[param], param) for param in packed.params}
            torch._foreach_copy_(
                [pieces.narrow(0, start, numel) for _, _, numel, start in self._runs],
                [by_param[param].narrow(0, first, numel) for param, first, numel, _ in self._runs],
            )
        pending.buffer_nbytes += pieces.nbytes
        return pieces


def _shard_gaps(layout: SpanLayout) -> list[tuple[int, int]]:
    """(start, numel) of the stretches of this rank's shard buffer in which no parameter lies."""
    used = sorted((start, layout.shard_param_numel(i)) for i, start in enumerate(layout.shard_starts))
    gaps, end = [], 0
    for start, numel in [*used, (layout.shard_numel, 0)]:
        if start > end:
            gaps.append((end, start - end))
        end = max(end, start + numel)
    return gaps


class LocalGather(GatherOp):
    """World size 1: the unsharded storage is the shard, or a cast of it."""

    def start(self, shard: Tensor) -> Pending:
        """Copy the shard over only if it is not the unsharded storage itself."""
        pairs = [(own, piece) for own, piece in zip(self._own, self._own_pieces(shard), strict=True)]
        for own, piece in pairs:
            if own.data_ptr() != piece.data_ptr():
                own.copy_(piece)
        return Pending([])


class LocalReduce(ReduceOp):
    """World size 1: the mean is the gradient."""

    def start(self, grads: Sequence[Tensor | None], into: Tensor | None = None) -> Pending:
        """Copy the gradients into the order of the shard buffer."""
        pending = Pending([])
        target = self._target(into, pending)
        for message in self.layout.direct:
            piece = target.narrow(0, message.shard_start, message.numels[0])
            piece.copy_(self._in_order(grads[message.param], message.param))
        pending.finish = lambda: target
        return pending
