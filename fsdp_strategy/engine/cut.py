"""Which elements of a parameter every rank owns: pure arithmetic, in both layouts.

Memory order is the order of a parameter's elements in memory. A rank owns a half-open range of it: whole rows in the
per-parameter layout; in the flat layout, what lies in the rank's piece of all parameters laid end to end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["per_parameter", "flat"]

# Every unsharded parameter starts at a cache line: unaligned weight gradients are slower to write, and collective
# payloads off 16 bytes leave NCCL's fast path.
ALIGN_NBYTES = 64


def shard_bounds(dim0: int, shard_world_size: int, shard_rank: int) -> tuple[int, int]:
    """Half-open row range that the rank owns, as `torch.chunk` cuts it. Trailing ranks may own nothing."""
    chunk = -(-dim0 // shard_world_size)
    return min(shard_rank * chunk, dim0), min((shard_rank + 1) * chunk, dim0)


def align(numel: int, itemsize: int) -> int:
    """`numel` rounded up to a whole number of `ALIGN_NBYTES`."""
    step = max(1, ALIGN_NBYTES // itemsize)
    return -(-numel // step) * step


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Shape and memory order of one unsharded parameter; `stride` is dense with dim 0 outermost.

    Elements of a complex parameter count as pairs of real ones.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_complex: bool = False

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

    def in_memory_order(self, full: Tensor) -> Tensor:
        """The elements of a whole tensor of this shape as a 1-D tensor; a view where its memory has that order."""
        if full.stride() != self.stride:
            full = torch.empty_strided(self.shape, self.stride, dtype=full.dtype, device=full.device).copy_(full)
        return full.as_strided((full.numel(),), (1,))

    def from_memory_order(self, flat: Tensor) -> Tensor:
        """The inverse of `in_memory_order`, a view."""
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Cut(ABC):
    """Who owns which elements of one parameter."""

    spec: ParamSpec
    shard_world_size: int

    @abstractmethod
    def bounds(self, rank: int) -> tuple[int, int]:
        """Half-open range of the memory order that the rank owns, in real elements."""

    @abstractmethod
    def view(self, buffer: Tensor, start: int, rank: int) -> Tensor:
        """The rank's shard as a tensor over `buffer`, a 1-D real one in which it begins at `start`."""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank owns the whole parameter."""
        return False

    def numel(self, rank: int) -> int:
        """Real elements that the rank owns."""
        first, last = self.bounds(rank)
        return last - first

    def numels(self) -> list[int]:
        """Real elements that every rank owns."""
        return [self.numel(rank) for rank in range(self.shard_world_size)]

    def piece_of(self, full: Tensor, rank: int) -> Tensor:
        """The rank's elements of a whole tensor of the parameter's shape, 1-D in memory order."""
        first, last = self.bounds(rank)
        pairs = 2 if self.spec.is_complex else 1
        return self.spec.in_memory_order(full)[first // pairs : last // pairs]


@dataclass(frozen=True, slots=True)
class RowCut(Cut):
    """Per-parameter layout: rows, as `torch.chunk` cuts them. A 0-d parameter is replicated."""

    @property
    def is_replicated(self) -> bool:
        """See `Cut`."""
        return not self.spec.shape

    def bounds(self, rank: int) -> tuple[int, int]:
        """See `Cut`."""
        if self.is_replicated:
            return 0, self.spec.numel
        first, last = shard_bounds(self.spec.dim0, self.shard_world_size, rank)
        return first * self.spec.row_numel, last * self.spec.row_numel

    def numels(self) -> list[int]:
        """See `Cut`. Without a look at every rank: there may be thousands."""
        size, spec = self.shard_world_size, self.spec
        if self.is_replicated:
            return [spec.numel] * size
        chunk = max(-(-spec.dim0 // size), 1)
        num_full, rest = divmod(spec.dim0, chunk)
        numels = [chunk * spec.row_numel] * num_full + ([rest * spec.row_numel] if rest else [])
        return numels + [0] * (size - len(numels))

    def rows(self, rank: int) -> tuple[int, int]:
        """Half-open row range that the rank owns."""
        return (0, 1) if self.is_replicated else shard_bounds(self.spec.dim0, self.shard_world_size, rank)

    def view(self, buffer: Tensor, start: int, rank: int) -> Tensor:
        """(rows, ...) with the parameter's memory order. See `Cut`."""
        spec, (first, last) = self.spec, self.rows(rank)
        shape = (last - first, *spec.shape[1:]) if spec.shape else ()
        if not spec.is_complex:
            return buffer.as_strided(shape, spec.stride, buffer.storage_offset() + start)
        pairs = (*(2 * step for step in spec.stride), 1)
        return torch.view_as_complex(buffer.as_strided((*shape, 2), pairs, buffer.storage_offset() + start))


@dataclass(frozen=True, slots=True)
class FlatCut(Cut):
    """Flat layout: the parameter begins at `start` of its span, which is cut into pieces of `piece_numel`."""

    start: int
    piece_numel: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """See `Cut`."""
        first = rank * self.piece_numel - self.start
        numel = self.spec.numel
        return min(max(first, 0), numel), min(max(first + self.piece_numel, 0), numel)

    def view(self, buffer: Tensor, start: int, rank: int) -> Tensor:
        """1-D. See `Cut`."""
        piece = buffer.narrow(0, start, self.numel(rank))
        return torch.view_as_complex(piece.view(-1, 2)) if self.spec.is_complex else piece


def cut_rows(specs: Sequence[ParamSpec], shard_world_size: int) -> tuple[RowCut, ...]:
    """Cut every parameter along dim 0."""
    return tuple(RowCut(spec, shard_world_size) for spec in specs)


def cut_flat(specs: Sequence[ParamSpec], itemsize: int, shard_world_size: int) -> tuple[FlatCut, ...]:
    """Lay the parameters end to end, each from a cache line on, and cut the whole into equal pieces.

    Args:
        specs: parameters of one (real) dtype.
        itemsize: bytes of one element in the unsharded storage.
        shard_world_size: number of pieces.
    """
    starts = [0]
    for spec in specs:
        starts.append(starts[-1] + align(spec.numel, itemsize))
    piece_numel = align(-(-starts[-1] // shard_world_size), itemsize)
    return tuple(
        FlatCut(spec, shard_world_size, start, piece_numel) for spec, start in zip(specs, starts, strict=False)
    )
