"""Accumulating micro-batches as reduced shards or as whole gradients: the same sums, a fraction of the reductions."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_strategy.engine import FullyShardedEngine, ShardMesh
from tests.engine_cases import (
    CPU,
    NUM_BLOCKS,
    Net,
    SmallBlock,
    Trained,
    assert_close,
    average_grads,
    batches,
    join_grads,
    loss_of,
    rank_batches,
    rows_of,
    seeded,
    shard,
    snapshot,
    unsharded_nbytes,
)
from tests.layouts import both_layouts
from tests.models import Tiny, dealt_loader
from tests.models import seeded as seeded_module
from tests.pooled_trainer import make_strategy, make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

NUM_MICRO = 4
TOLERANCE = 1e-6


class SometimesSkipping(Net):
    """The second block takes part in the first micro-batch only."""

    def __init__(self) -> None:
        super().__init__(SmallBlock)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index != 1 or self.num_calls % NUM_MICRO == 0:
                x = block(x)
        self.num_calls += 1
        return self.head(x)


BUILDS: dict[str, Any] = {"net": lambda: Net(SmallBlock), "skipping": SometimesSkipping}


def _backward_all(model: nn.Module, data: Sequence[Any], engine: FullyShardedEngine | None = None) -> None:
    for index, batch in enumerate(data):
        is_last = index == len(data) - 1
        with nullcontext() if engine is None or is_last else engine.accumulating():
            loss_of(model, batch).backward()


def _accumulate(build: str, *, unsharded: bool) -> tuple[Trained, list[int], int]:
    """Gradients of the second time round; reductions of both; what is unsharded in the end."""
    model = seeded(BUILDS[build])
    engine = shard(model)
    reductions = []
    for _ in range(2):
        for param in model.parameters():
            param.grad = None
        with engine.record() as recorder:
            _backward_all(model, rank_batches(engine, batches(NUM_MICRO)), engine if unsharded else None)
        reductions.append(recorder.count("reduce_scatter"))
    return snapshot(model), reductions, unsharded_nbytes(engine)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_both_ways_give_the_gradients_of_one_process(ranks: RankPool, build: str, world_size: int) -> None:
    model = seeded(BUILDS[build])

    def run(rank: int) -> None:
        model.num_calls = 0
        _backward_all(model, [rows_of(batch, rank, world_size) for batch in batches(NUM_MICRO)])

    average_grads(model, run, world_size)
    reference = snapshot(model)
    for unsharded in (True, False):
        answers = ranks.run(_accumulate, world_size, build, unsharded=unsharded)
        assert_close(join_grads([shards for shards, *_ in answers], reference), reference.grads, TOLERANCE)
        assert [left for *_, left in answers] == [0] * world_size


def test_whole_gradients_are_reduced_once_for_four_micro_batches(ranks: RankPool) -> None:
    num_units = NUM_BLOCKS + 1
    for (_, sharded, _), (_, unsharded, _) in zip(
        ranks.run(_accumulate, 2, "net", unsharded=False), ranks.run(_accumulate, 2, "net", unsharded=True), strict=True
    ):
        assert sharded == [NUM_MICRO * num_units] * 2
        assert unsharded == [num_units] * 2


def _held_nbytes(dtype: torch.dtype | None) -> tuple[int, int, bool]:
    """Bytes of whole gradients held between micro-batches, of the parameters in fp32, and whether abandoning frees."""
    model = seeded(BUILDS["net"])
    num_params = sum(param.numel() for param in model.parameters())
    config = {} if dtype is None else {"param_dtypes": {f"blocks.{i}.linear.weight": dtype for i in range(NUM_BLOCKS)}}
    engine = shard(model, **config)
    with engine.accumulating(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        loss_of(model, rank_batches(engine, batches(1))[0]).backward()
    held = engine.live_nbytes["unsharded_grad"]
    engine.abandon()
    return held, num_params * 4, engine.live_nbytes["unsharded_grad"] == 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_whole_gradients_cost_four_bytes_per_parameter_in_any_param_dtype(
    ranks: RankPool, dtype: torch.dtype | None
) -> None:
    for held, expected, is_freed in ranks.run(_held_nbytes, 2, dtype):
        assert held == expected
        assert is_freed


def _fit(strategy: str, accumulate: str | None, precision: str) -> tuple[dict[str, Tensor], int]:
    options = {} if accumulate is None else {"accumulate": accumulate}
    model = seeded_module(Tiny)
    trainer = make_trainer(make_strategy(strategy, **options), accumulate_grad_batches=4, precision=precision)
    # 10 micro-batches on each of 2 ranks: the last group has two.
    trainer.fit(model, dealt_loader(40, 2))
    return weights(trainer), trainer.global_step


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", ["sharded", "unsharded"])
def test_the_trainer_accumulates_as_with_ddp(ranks: RankPool, accumulate: str, precision: str) -> None:
    expected, num_steps = ranks.run(_fit, 2, "ddp", None, precision)[0]
    trained, num_our_steps = ranks.run(_fit, 2, "ours", accumulate, precision)[0]
    assert num_our_steps == num_steps == 3
    tolerance = 1e-6 if precision == "32-true" else 2e-3
    assert_close(trained, expected, tolerance)


class StepsTooEarly(Tiny):
    """Manual optimization that never runs a backward outside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def _steps_too_early() -> str:
    trainer = make_trainer(make_strategy(accumulate="unsharded"))
    with pytest.raises(RuntimeError, match="accumulated") as caught:
        trainer.fit(seeded_module(StepsTooEarly), dealt_loader(8, 2))
    return str(caught.value)


def test_a_step_on_gradients_that_are_not_reduced_is_an_error(ranks: RankPool) -> None:
    for rank, message in enumerate(ranks.run(_steps_too_early, 2)):
        assert f"[rank {rank}]" in message
        assert "block_backward_sync" in message


def _without_last_loss() -> tuple[Trained, bool]:
    """The last micro-batch has no loss: what came before it is reduced at the end of its iteration all the same."""
    model = seeded(BUILDS["net"])
    engine = shard(model)
    with engine.accumulating():
        loss_of(model, rank_batches(engine, batches(1))[0]).backward()
    engine.begin("training")
    engine.end()
    return snapshot(model), engine.has_accumulated


def test_a_group_whose_last_micro_batch_has_no_loss_is_reduced(ranks: RankPool) -> None:
    model = seeded(BUILDS["net"])
    average_grads(model, lambda rank: loss_of(model, rows_of(batches(1)[0], rank, 2)).backward(), 2)
    reference = snapshot(model)
    answers = ranks.run(_without_last_loss, 2)
    assert_close(join_grads([shards for shards, _ in answers], reference), reference.grads, TOLERANCE)
    assert [has_accumulated for _, has_accumulated in answers] == [False, False]


def _mixed_kinds() -> str:
    model = seeded(BUILDS["net"])
    engine = FullyShardedEngine(model, ShardMesh(CPU))
    with pytest.raises(RuntimeError, match="kind of step") as caught:
        engine.begin("training" if engine.mesh.shard_rank else "validation")
    return str(caught.value)


def test_ranks_in_different_loops_are_told_at_once(ranks: RankPool) -> None:
    for rank, message in enumerate(ranks.run(_mixed_kinds, 3)):
        assert f"[rank {rank}]" in message
        assert "'validation' on rank 0, 'training' on rank 1, 'training' on rank 2" in message


def _gathered_once(reshard_after_backward: bool) -> tuple[Trained, list[int], list[int], int]:
    """Gradients, gathers of every micro-batch and bytes unsharded after it, twice round; what is left in the end."""
    model = seeded(BUILDS["net"])
    engine = shard(model, reshard_after_backward=reshard_after_backward)
    gathers, held = [], []
    for _ in range(2):
        for param in model.parameters():
            param.grad = None
        for index, batch in enumerate(rank_batches(engine, batches(NUM_MICRO))):
            with engine.record() as recorder, engine.accumulating() if index < NUM_MICRO - 1 else nullcontext():
                loss_of(model, batch).backward()
            gathers.append(recorder.count("all_gather"))
            held.append(engine.live_nbytes["unsharded_param"])
            if index == 1:
                with torch.no_grad():
                    model(batch[0])  # a validation in between frees what was kept
    return snapshot(model), gathers, held, unsharded_nbytes(engine)


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_may_stay_unsharded_over_micro_batches(ranks: RankPool, world_size: int) -> None:
    reference = snapshot(seeded(BUILDS["net"]))
    freed = ranks.run(_gathered_once, world_size, True)
    kept = ranks.run(_gathered_once, world_size, False)
    assert_close(join_grads([r for r, *_ in kept], reference), join_grads([r for r, *_ in freed], reference), TOLERANCE)
    num_units, twice = NUM_BLOCKS + 1, 2 * NUM_BLOCKS + 1
    for (_, gathers, held, left), (_, all_gathers, none_held, _) in zip(kept, freed, strict=True):
        assert all_gathers == [twice] * 2 * NUM_MICRO
        # Gathered in the first micro-batch, again after the validation, and freed with the last one.
        assert gathers == [num_units, 0, num_units, 0] * 2
        assert [nbytes > 0 for nbytes in held] == [True, True, True, False] * 2
        assert set(none_held) == {0}
        assert left == 0


def test_keeping_parameters_without_accumulating_is_an_error() -> None:
    with pytest.raises(ValueError, match="only with accumulate='unsharded'"):
        make_strategy(reshard_after_backward=False)
