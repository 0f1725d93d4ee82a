"""What cannot be sharded is refused on every rank, before anything is changed, with what to do about it."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_strategy.engine import EngineConfig, FullyShardedEngine, ShardMesh, UnitState
from fsdp_strategy.engine.sharded_tensor import ShardedTensor
from tests.engine_cases import (
    CPU,
    WIDTH,
    Net,
    SmallBlock,
    Trained,
    assert_close,
    batches,
    join_params,
    loss_of,
    make_optimizer,
    rank_batches,
    seeded,
    shard,
    small_net,
    snapshot,
    train,
    unsharded_nbytes,
)
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts


@pytest.mark.parametrize("unknown", ["per-parameter", "Flat", ""])
def test_an_unknown_layout_is_refused_with_the_known_ones(unknown: str) -> None:
    with pytest.raises(ValueError, match=f"'per_parameter', 'flat', got '{unknown}'"):
        EngineConfig(layout=unknown)


@pytest.mark.parametrize("prefetch_limit", [-1, 1.5, "1", None])
def test_a_prefetch_limit_that_is_not_a_count_is_refused(prefetch_limit: Any) -> None:
    with pytest.raises(ValueError, match=f"prefetch_limit to be an integer >= 0, got {prefetch_limit!r}"):
        EngineConfig(prefetch_limit=prefetch_limit)


def test_a_mesh_without_process_group_is_refused() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ShardMesh(CPU)


def _on_rank_1(good: Callable[[], nn.Module], bad: Callable[[], nn.Module]) -> nn.Module:
    return bad() if dist.get_rank() == 1 else good()


class Bare(nn.Module):
    """Cannot give itself values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, device="meta"))


def _with_meta_parameter() -> nn.Module:
    net = small_net()
    net.blocks[1].extra = Bare()
    return net


def _with_lazy_parameter() -> nn.Module:
    net = small_net()
    net.head = nn.LazyLinear(1)
    return net


def _with_boolean_parameter() -> nn.Module:
    net = small_net()
    net.mask = nn.Parameter(torch.zeros(2, dtype=torch.bool), requires_grad=False)
    return net


def _with_wider_block() -> nn.Module:
    net = small_net()
    net.blocks[1] = SmallBlock(WIDTH + 1)
    return net


def _with_other_dtype() -> nn.Module:
    net = small_net()
    net.blocks[2].norm.bias = nn.Parameter(net.blocks[2].norm.bias.double())
    return net


def _with_one_more_block() -> nn.Module:
    return Net(SmallBlock, num_blocks=4)


def _with_one_block_less() -> nn.Module:
    return Net(SmallBlock, num_blocks=2)


def _without_parameters() -> nn.Module:
    return nn.Sequential(nn.GELU(), nn.Identity())


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "meta": _with_meta_parameter,
    "lazy": _with_lazy_parameter,
    "boolean": _with_boolean_parameter,
    "wider": _with_wider_block,
    "dtype": _with_other_dtype,
    "more": _with_one_more_block,
    "less": _with_one_block_less,
    "empty": _without_parameters,
}


def _refusal(build: str, is_everywhere: bool, units: Any) -> tuple[str, float, bool]:
    """The message with which this rank refuses the model, the seconds it took, and whether anything was changed."""
    model = BUILDS[build]() if is_everywhere else _on_rank_1(small_net, BUILDS[build])
    before = {fqn: (id(p), p if p.is_meta or nn.parameter.is_lazy(p) else p.detach().clone())
              for fqn, p in model.named_parameters()}  # fmt: skip
    mesh = ShardMesh(CPU, timeout=timedelta(seconds=20))
    start = time.monotonic()
    with pytest.raises(ValueError, match="Expected") as error:
        FullyShardedEngine(model, mesh, EngineConfig(units=units))
    seconds = time.monotonic() - start
    after = dict(model.named_parameters())
    is_unchanged = list(after) == list(before) and all(
        id(after[fqn]) == key and (value is after[fqn] or torch.equal(value, after[fqn]))
        for fqn, (key, value) in before.items()
    )
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    return str(error.value), seconds, is_unchanged and (not hooks or build == "lazy")


LOCAL_MISTAKES = [
    ("meta", ["meta device", "`blocks.1.extra`", "'weight'", "reset_parameters"]),
    ("lazy", ["lazy", "`head.weight`", "forward"]),
    ("boolean", ["torch.bool", "`mask`", "buffer"]),
    ("empty", ["Sequential", "without any"]),
]


@pytest.mark.parametrize(("build", "words"), LOCAL_MISTAKES, ids=[build for build, _ in LOCAL_MISTAKES])
def test_what_one_rank_cannot_shard_every_rank_refuses_naming_the_rank_and_the_parameter(
    ranks: RankPool, build: str, words: list[str]
) -> None:
    for message, seconds, is_unchanged in ranks.run(_refusal, 3, build, False, "auto"):
        assert message.startswith("[rank 1] ")
        assert all(word in message for word in words), message
        assert seconds < 5
        assert is_unchanged


@pytest.mark.parametrize(("build", "words"), LOCAL_MISTAKES, ids=[build for build, _ in LOCAL_MISTAKES])
def test_what_no_rank_can_shard_is_refused_for_every_rank(ranks: RankPool, build: str, words: list[str]) -> None:
    for world_size in (1, 2):
        for message, _, is_unchanged in ranks.run(_refusal, world_size, build, True, "auto"):
            assert message.startswith("[every rank] ")
            assert all(word in message for word in words), message
            assert is_unchanged


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("wider", ["`blocks.1.norm.weight` (12,)", "`blocks.1.norm.weight` (13,)"]),
        ("dtype", ["`blocks.2.norm.bias` (12,) torch.float32", "torch.float64"]),
        ("more", ["no further parameter", "`blocks.3.norm.weight`"]),
        ("less", ["`blocks.2.norm.weight`", "no further parameter"]),
    ],
)
def test_ranks_with_different_models_all_refuse_naming_the_rank_and_the_first_difference(
    ranks: RankPool, build: str, words: list[str]
) -> None:
    for message, seconds, is_unchanged in ranks.run(_refusal, 3, build, False, "auto"):
        assert "different one on rank 1:" in message
        first, second = (message.index(word) for word in words)
        assert first < second, "rank 0's model is named first"
        assert seconds < 5
        assert is_unchanged


@pytest.mark.parametrize("units", ["Blok", ["SmallBlock", "decoder.*"], "blocks"])
def test_units_that_cannot_be_found_are_refused_on_every_rank(ranks: RankPool, units: Any) -> None:
    named = units if isinstance(units, str) else units[-1]
    for message, _, is_unchanged in ranks.run(_refusal, 2, "more", True, units):
        assert named in message
        assert "[every rank] cannot shard Net" in message
        assert is_unchanged


def _nest_recorders() -> list[str]:
    engine = shard(seeded(small_net))
    with engine.record():
        with pytest.raises(RuntimeError, match="active recorder") as error, engine.record():
            raise AssertionError("a second recorder started")
        first = str(error.value)
    with engine.record() as recorder:
        engine.module(batches(1)[0][0])
    return [first, *(event.kind for event in recorder.events[:1])]


def test_recorders_do_not_nest_but_follow_each_other(ranks: RankPool) -> None:
    (answer,) = ranks.run(_nest_recorders, 1)
    assert len(answer) == 2


def _illegal_moves() -> list[tuple[str, str]]:
    """State and message of every move that a unit refuses."""
    engine = shard(seeded(small_net))
    unit = next(unit for unit in engine.units if unit.fqn == "blocks.1")
    refused = []

    def refuse(move: Callable[[], None]) -> None:
        with pytest.raises(RuntimeError) as error:
            move()
        refused.append((unit.state.name, str(error.value)))

    refuse(unit.reshard)
    unit.unshard()
    refuse(unit.unshard)
    refuse(unit.reshard)
    unit.wait_for_unshard()
    refuse(unit.unshard)
    unit.reshard()
    assert unit.state is UnitState.SHARDED
    return refused


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_refuses_moves_that_its_state_does_not_allow(ranks: RankPool, world_size: int) -> None:
    moves = [("SHARDED", "SHARDED"), ("GATHERING", "GATHERING"), ("GATHERING", "SHARDED"), ("UNSHARDED", "GATHERING")]
    for refused in ranks.run(_illegal_moves, world_size):
        assert [state for state, _ in refused] == [state for state, _ in moves]
        for (_, message), (state, to) in zip(refused, moves, strict=True):
            assert re.search(f"unit `blocks.1`: cannot go from {state} to {to}", message)


class BreaksOnDemand(SmallBlock):
    """Raises in the forward or the backward of the calls that it is told."""

    breaks_in = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks_in == "forward":
            raise ArithmeticError("broken")
        y = super().forward(x)
        if self.breaks_in == "backward" and y.requires_grad:
            y.register_hook(_break)
        return y


def _break(grad: Tensor) -> Tensor:
    raise ArithmeticError("broken")


def _train_with_breaks(where: str, native: bool) -> tuple[Trained, int]:
    """Every second iteration breaks on all ranks and is abandoned."""
    model = seeded(lambda: Net(BreaksOnDemand))
    engine = shard(model, native=native)
    optimizer = make_optimizer("sgd", model.parameters())
    left = 0
    for batch in rank_batches(engine, batches(3)):
        model.blocks[1].breaks_in = where
        with pytest.raises(ArithmeticError, match="broken"):
            loss_of(model, batch).backward()
        engine.abandon()
        optimizer.zero_grad()
        model.blocks[1].breaks_in = ""
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        left += unsharded_nbytes(engine)
    return snapshot(model), left


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_abandoned_iteration_leaves_no_trace_in_training(ranks: RankPool, world_size: int, where: str) -> None:
    reference = train(seeded(small_net), batches(3))
    with ranks.timeout(10):
        answers = ranks.run(_train_with_breaks, world_size, where, False)
    results = [result for result, _ in answers]
    # Sums over ranks run in another order than over rows: a few roundings of 2**-24. A stale gradient is off by 1e-4.
    assert_close(join_params(results, reference), reference.params, 2e-6)
    assert [left for _, left in answers] == [0] * world_size, "what was in flight is freed by the next iteration"


def _break_in_iteration() -> tuple[set[UnitState], bool]:
    """States of the units after an iteration that raised, and whether the modules show shards again."""
    model = seeded(lambda: Net(BreaksOnDemand))
    engine = shard(model)
    model.blocks[2].breaks_in = "forward"
    with pytest.raises(ArithmeticError), engine.iteration("training"):
        model(batches(1)[0][0])
    return {unit.state for unit in engine.units}, all(isinstance(param, ShardedTensor) for param in model.parameters())


def test_an_iteration_that_raises_is_abandoned(ranks: RankPool) -> None:
    for states, shows_shards in ranks.run(_break_in_iteration, 2):
        assert UnitState.UNSHARDED not in states
        assert shows_shards
