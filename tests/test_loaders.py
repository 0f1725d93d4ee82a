"""Ranks whose data end at different times: all stop together, whoever runs dry."""

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.engine_cases import assert_equal
from tests.layouts import both_layouts
from tests.models import IN_FEATURES, OUT_FEATURES, TinyWithStages, seeded
from tests.pooled_trainer import make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

ROWS = 2
SHORTEST = 3


def _rows(rank: int, num_batches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_batches * ROWS, IN_FEATURES, generator=generator)
    return x, torch.randn(num_batches * ROWS, OUT_FEATURES, generator=generator)


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """Rows, their number unknown until they end; may claim another number."""

    def __init__(self, num_batches: int) -> None:
        self.rows = _rows(dist.get_rank(), 8)
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        yield from zip(*(part[: self.num_batches * ROWS] for part in self.rows), strict=True)


class ClaimingStream(Stream):
    """Has fewer rows than its length says."""

    def __len__(self) -> int:
        return 6 * ROWS


def _loader(kind: str, num_batches: int) -> Any:
    if kind == "sized":
        dataset = TensorDataset(*(part[: num_batches * ROWS] for part in _rows(dist.get_rank(), 8)))
    else:
        dataset = Stream(num_batches) if kind == "stream" else ClaimingStream(num_batches)
    return DataLoader(dataset, batch_size=ROWS)


class Counting(pl.Callback):
    """Batches of every training and validation epoch on this rank."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_epoch_start(self, *args: Any) -> None:
        self.counts.append(0)

    on_validation_epoch_start = on_train_epoch_start

    def on_train_batch_end(self, *args: Any) -> None:
        self.counts[-1] += 1

    on_validation_batch_end = on_train_batch_end


def _fit(kind: str, train_extra: int, val_extra: int, **options: Any) -> tuple[list[int], dict[str, Tensor], list[str]]:
    """Each rank has `extra` times its rank more batches than the shortest."""
    rank, counting, said = dist.get_rank(), Counting(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp_strategy.loaders")
    logger.addHandler(handler)
    try:
        trainer = make_trainer(callbacks=[counting], max_epochs=2, use_distributed_sampler=False, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
            trainer.fit(
                seeded(TinyWithStages),
                _loader(kind, SHORTEST + train_extra * rank),
                _loader(kind, SHORTEST + val_extra * rank),
            )
    finally:
        logger.removeHandler(handler)
    return counting.counts, weights(trainer), said


@pytest.mark.parametrize("kind", ["stream", "claiming", "sized"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_stop_with_the_first_that_runs_dry(ranks: RankPool, kind: str, world_size: int) -> None:
    even = ranks.run(_fit, world_size, kind, 0, 0)
    uneven = ranks.run(_fit, world_size, kind, 2, 1)
    # Lightning expects a claimed length to hold: it validates where the training epoch should have ended.
    num_epochs = 2 if kind == "claiming" else 4
    assert [counts for counts, *_ in uneven] == [[SHORTEST] * num_epochs] * world_size
    assert_equal(uneven[0][1], even[0][1])
    for rank, (_, _, said) in enumerate(uneven):
        assert any("not used" in line for line in said) == (rank == 0)
    assert not any(said for *_, said in even)


def test_an_incomplete_group_of_micro_batches_ends_in_a_step_on_every_rank(ranks: RankPool) -> None:
    even = ranks.run(_fit, 2, "stream", 0, 0, accumulate_grad_batches=2)
    uneven = ranks.run(_fit, 2, "stream", 1, 0, accumulate_grad_batches=2)
    assert_equal(uneven[0][1], even[0][1])


def _types() -> tuple[bool, bool]:
    """Whether a loader that is sure to be even is left as it is, and whether another still answers as itself."""
    even, stream = _loader("sized", SHORTEST), _loader("stream", SHORTEST)
    trainer = make_trainer(use_distributed_sampler=False)
    trainer.fit(seeded(TinyWithStages), even, stream)
    return trainer.train_dataloader is even, trainer.val_dataloaders.batch_size == ROWS


def test_loaders_that_are_sure_to_be_even_stay_as_they_are(ranks: RankPool) -> None:
    assert ranks.run(_types, 2) == [(True, True)] * 2
