"""Training on ranks gives what one process gives on the joined batch, and what DDP gives, bit for bit where it can."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_strategy.engine.optimizer import LocalStep
from tests import layouts
from tests.engine_cases import (
    Net,
    Trained,
    assert_close,
    assert_equal,
    batches,
    join_params,
    loss_of,
    make_optimizer,
    rank_batches,
    rows_of,
    seeded,
    shard,
    small_net,
    snapshot,
    train,
)
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts

NUM_STEPS = 10
# Sums over ranks run in another order than sums over the rows of the joined batch. Ten steps carry a few roundings of
# 2**-24 each; a gradient lost, doubled or divided wrongly moves parameters by more than 1e-3.
FLOAT32_TOLERANCE = 2e-5
# The same with roundings of 2**-53: nothing but rounding hides below this.
FLOAT64_TOLERANCE = 1e-12

every_optimizer = pytest.mark.parametrize("optimizer", ["sgd", "adamw"])


def _net() -> Net:
    return Net(num_blocks=2)


def _train_sharded(
    optimizer: str, dtype: torch.dtype = torch.float32, native: bool | None = None, seed_per_rank: bool = False
) -> Trained:
    model = seeded(_net, seed=dist.get_rank() if seed_per_rank else 0).to(dtype)
    engine = shard(model, native=native)
    return train(model, rank_batches(engine, batches(NUM_STEPS, dtype)), optimizer)


def _train_ddp(optimizer: str) -> Trained:
    model = seeded(_net)
    data = [rows_of(batch, dist.get_rank(), dist.get_world_size()) for batch in batches(NUM_STEPS)]
    losses = train(DistributedDataParallel(model), data, optimizer).losses
    return snapshot(model, losses)


class Runs:
    """Results of `_train_sharded`, each made once for the module: several laws look at the same runs."""

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._known: dict[tuple[Any, ...], list[Trained]] = {}

    def sharded(self, world_size: int, optimizer: str) -> list[Trained]:
        key = (layouts.current(), world_size, optimizer)
        if key not in self._known:
            self._known[key] = self._ranks.run(_train_sharded, world_size, optimizer)
        return self._known[key]


@pytest.fixture(scope="module")
def runs(ranks: RankPool) -> Runs:
    return Runs(ranks)


@cache
def _reference(optimizer: str) -> Trained:
    return train(seeded(_net), batches(NUM_STEPS), optimizer)


def _assert_losses_close(results: list[Trained], reference: Trained, tolerance: float) -> None:
    for step, expected in enumerate(reference.losses):
        mean = sum(result.losses[step] for result in results) / len(results)
        assert abs(mean - expected) <= tolerance * max(1.0, abs(expected)), f"step {step}"


@every_optimizer
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_training_equals_one_process_on_the_joined_batch(runs: Runs, world_size: int, optimizer: str) -> None:
    reference, results = _reference(optimizer), runs.sharded(world_size, optimizer)
    assert_close(join_params(results, reference), reference.params, FLOAT32_TOLERANCE)
    _assert_losses_close(results, reference, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_float64_only_rounding_is_left(ranks: RankPool, world_size: int) -> None:
    reference = train(seeded(_net).double(), batches(NUM_STEPS, torch.float64), "adamw")
    results = ranks.run(_train_sharded, world_size, "adamw", torch.float64)
    assert_close(join_params(results, reference), reference.params, FLOAT64_TOLERANCE)
    _assert_losses_close(results, reference, FLOAT64_TOLERANCE)


@every_optimizer
@pytest.mark.parametrize("world_size", [2, 3])
def test_both_layouts_give_the_same_bits(ranks: RankPool, world_size: int, optimizer: str) -> None:
    reference, results = _reference(optimizer), ranks.run(_train_sharded, world_size, optimizer)
    in_this = join_params(results, reference)
    in_the_other, losses = _in_the_other_layout(ranks, world_size, optimizer)
    assert_equal(in_this, in_the_other)
    assert [result.losses for result in results] == losses


def _in_the_other_layout(
    ranks: RankPool, world_size: int, optimizer: str
) -> tuple[dict[str, Tensor], list[list[float]]]:
    with layouts.using(layouts.other()):
        results = ranks.run(_train_sharded, world_size, optimizer)
        return join_params(results, _reference(optimizer)), [result.losses for result in results]


@every_optimizer
def test_one_rank_trains_as_a_plain_module_bit_for_bit(runs: Runs, optimizer: str) -> None:
    reference, results = _reference(optimizer), runs.sharded(1, optimizer)
    assert_equal(join_params(results, reference), reference.params)
    assert results[0].losses == reference.losses


@every_optimizer
def test_two_ranks_train_as_ddp_does_bit_for_bit(ranks: RankPool, runs: Runs, optimizer: str) -> None:
    replicas = ranks.run(_train_ddp, 2, optimizer)
    results = runs.sharded(2, optimizer)
    assert_equal(join_params(results, replicas[0]), replicas[0].params)
    assert [result.losses for result in results] == [replica.losses for replica in replicas]


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_runs_are_equal_bit_for_bit(ranks: RankPool, runs: Runs, world_size: int) -> None:
    first, second = runs.sharded(world_size, "adamw"), ranks.run(_train_sharded, world_size, "adamw")
    for one, other in zip(first, second, strict=True):
        assert_equal(one.params, other.params)
        assert one.losses == other.losses


def test_on_two_ranks_native_collectives_train_as_messages_do_bit_for_bit(ranks: RankPool, runs: Runs) -> None:
    one, other = runs.sharded(2, "sgd"), ranks.run(_train_sharded, 2, "sgd", torch.float32, True)
    for first, second in zip(one, other, strict=True):
        assert_equal(first.params, second.params)


@pytest.mark.parametrize("world_size", [3, 4])
def test_native_collectives_train_as_one_process_does(ranks: RankPool, world_size: int) -> None:
    reference, results = _reference("adamw"), ranks.run(_train_sharded, world_size, "adamw", torch.float32, True)
    assert_close(join_params(results, reference), reference.params, FLOAT32_TOLERANCE)


def test_the_initial_values_of_rank_0_win(ranks: RankPool) -> None:
    reference, results = _reference("sgd"), ranks.run(_train_sharded, 3, "sgd", torch.float32, None, True)
    assert_close(join_params(results, reference), reference.params, FLOAT32_TOLERANCE)


def _shard_buffers() -> tuple[Tensor, Tensor, Tensor | None]:
    model = Net()
    generator = torch.Generator().manual_seed(dist.get_rank())
    model.register_buffer("table", torch.rand(2, 3, generator=generator).t())
    model.blocks[1].register_buffer("steps", torch.tensor(dist.get_rank() + 5), persistent=False)
    model.blocks[1].register_buffer("nothing", None)
    shard(model)
    return model.table.clone(), model.blocks[1].steps.clone(), model.blocks[1].nothing


def test_the_buffers_of_rank_0_win(ranks: RankPool) -> None:
    table = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).t()
    for shared, steps, nothing in ranks.run(_shard_buffers, 3):
        assert torch.equal(shared, table)
        assert int(steps) == 5
        assert nothing is None


def _train_with_evaluation(native: bool | None) -> tuple[Trained, list[Tensor]]:
    """Forwards without gradients before, between and after training steps."""
    model = seeded(_net)
    engine = shard(model, native=native)
    optimizer = make_optimizer("sgd", model.parameters())
    (x, _) = batches(1, first=50)[0]
    seen = []
    for step, batch in enumerate(rank_batches(engine, batches(4))):
        with torch.no_grad() if step % 2 else torch.inference_mode():
            seen.append(model(x).clone())
            model(x)
        loss_of(model, batch).backward()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            model(x)
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        seen.append(model(x).clone())
    return snapshot(model), [value.detach() for value in seen]


@pytest.mark.parametrize("native", [False, True])
def test_forwards_without_gradients_do_not_change_training(ranks: RankPool, native: bool) -> None:
    reference = train(seeded(_net), batches(4), "sgd")
    results = ranks.run(_train_with_evaluation, 2, native)
    assert_close(join_params([result for result, _ in results], reference), reference.params, FLOAT32_TOLERANCE)
    with torch.no_grad():
        first = seeded(_net)(batches(1, first=50)[0][0])
    for _, seen in results:
        # The first evaluation has the initial parameters on every rank, so that not even rounding may differ.
        assert torch.equal(seen[0], first)
        assert not torch.equal(seen[-1], first)


class MixedNet(nn.Module):
    """Channels-last kernels, a tied parameter, units inside units; complex, 0-d, integer and float64 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_ConvBlock() for _ in range(2))
        self.first = nn.Linear(15, 7, bias=False)
        self.last = nn.Linear(15, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:  # (rows, 3, 5)
        for block in self.blocks:
            x = block(x)
        return (self.first(x.flatten(1)) * self.last(x.flatten(1))).sum(1, keepdim=True)


class _ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, (3, 3), padding=1).to(memory_format=torch.channels_last)
        self.back = nn.Conv2d(5, 3, 1)
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.filter = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
        self.order = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        image = self.conv(x[:, self.order].unsqueeze(-1)) * self.scale.float().view(1, 5, 1, 1)
        filtered = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=5)
        return x + torch.tanh(self.back(image)).squeeze(-1) * self.temperature + 0.1 * filtered


def _mixed_step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


def _train_mixed(x: Tensor) -> Trained:
    model = seeded(MixedNet)
    engine = shard(model, units=["_ConvBlock", "blocks.*.back"])
    assert [unit.fqn for unit in engine.units] == ["", "blocks.0", "blocks.0.back", "blocks.1", "blocks.1.back"]
    optimizer = make_optimizer("sgd", model.parameters())
    for part in x.chunk(2):
        _mixed_step(model, part.chunk(dist.get_world_size())[dist.get_rank()], optimizer)
    return snapshot(model)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_memory_orders_ties_dtypes_and_nested_units_train_as_in_one_process(ranks: RankPool, world_size: int) -> None:
    x = torch.randn(24, 3, 5, generator=torch.Generator().manual_seed(3))
    model = seeded(MixedNet)
    optimizer = make_optimizer("sgd", model.parameters())
    for part in x.chunk(2):
        _mixed_step(model, part, optimizer)
    reference = snapshot(model)
    results = ranks.run(_train_mixed, world_size, x)
    assert_close(join_params(results, reference), reference.params, FLOAT32_TOLERANCE)
    for name, dtype in (("scale", torch.float64), ("filter", torch.complex64), ("order", torch.int64)):
        assert results[0].params[f"blocks.0.{name}"].dtype == dtype


def _train_with_local_step(optimizer_name: str, is_local: bool) -> Trained:
    model = seeded(small_net)
    engine = shard(model)
    optimizer = make_optimizer(optimizer_name, model.parameters())
    if is_local:
        LocalStep(optimizer, engine.params)
    for batch in rank_batches(engine, batches(4)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return snapshot(model)


@every_optimizer
def test_a_step_on_local_tensors_equals_one_on_dtensors_bit_for_bit(ranks: RankPool, optimizer: str) -> None:
    runs = [ranks.run(_train_with_local_step, 2, optimizer, is_local) for is_local in (True, False)]
    for local_run, visible_run in zip(*runs, strict=True):
        assert_equal(local_run.params, visible_run.params)
