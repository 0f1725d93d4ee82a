"""Loaders that end on all ranks together: every training and validation step needs every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fsdp_strategy.engine.collectives import Collectives

log = logging.getLogger(__name__)

_NO_BATCH = object()


class AgreedLoader:
    """Around a loader that may have another number of batches on every rank: ends with the first that has no more.

    Costs one small message between CPUs per batch. Everything else is asked of the loader itself.
    """

    def __init__(self, loader: Any, collectives: Collectives) -> None:
        """`collectives`: of the ranks that must end together."""
        self._loader, self._collectives = loader, collectives
        self._has_warned = False

    def __iter__(self) -> Iterator[Any]:
        """Batches for as long as every rank has one. Collective at every batch."""
        num_batches = 0
        batches = iter(self._loader)
        while True:
            batch = next(batches, _NO_BATCH)
            is_dry = batch is _NO_BATCH
            some_are_dry, some_are_not = self._collectives.agree_max(
                torch.tensor([int(is_dry), int(not is_dry)])
            ).tolist()
            if some_are_dry:
                if some_are_not:
                    self._warn(num_batches)
                return
            num_batches += 1
            yield batch

    def _warn(self, num_batches: int) -> None:
        if self._collectives.shard_rank == 0 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "A rank has no more batches after %d; all ranks stop there, and what the others have left is not used.",
                num_batches,
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)


class SizedAgreedLoader(AgreedLoader):
    """An `AgreedLoader` whose ranks know how many batches they expect."""

    def __init__(self, loader: Any, collectives: Collectives, num_batches: int) -> None:
        """`num_batches`: the smallest of any rank."""
        super().__init__(loader, collectives)
        self._num_batches = num_batches

    def __len__(self) -> int:
        """The smallest number of batches of any rank."""
        return self._num_batches


def _len(loader: Any) -> int:
    """Number of batches, -1 where unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return -1


def end_together(loader: Any, collectives: Collectives) -> Any:
    """`loader` itself if all ranks are sure to have as many batches, else an `AgreedLoader` around it. Collective."""
    num_batches = _len(loader)
    is_iterable = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    longest, negated = collectives.agree_max(torch.tensor([num_batches, -num_batches])).tolist()
    shortest = -negated
    if shortest < 0:
        return AgreedLoader(loader, collectives)
    if shortest == longest and not is_iterable:
        return loader
    if shortest != longest and collectives.shard_rank == 0:
        log.warning(
            "Ranks have %d to %d batches; all stop after %d, and what the others have left is not used.",
            shortest,
            longest,
            shortest,
        )
    return SizedAgreedLoader(loader, collectives, shortest)
