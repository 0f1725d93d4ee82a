"""Memory as formulas in bytes: what the engine's ledger says, and what torch's allocator saw.

The allocator is watched through the memory events of torch's profiler, which know nothing of the engine.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fsdp_strategy.engine import FullyShardedEngine, Recorder
from fsdp_strategy.engine.cut import ALIGN_NBYTES
from fsdp_strategy.engine.optimizer import LocalStep
from tests.engine_cases import Net, fake_group, seeded, shard, unsharded_nbytes
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts

WIDTH, NUM_BLOCKS = 192, 4
MARKER_NBYTES = 12_345  # no tensor here has this size


class WideBlock(nn.Module):
    """Most of it travels alone: 144 KiB matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class WideNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


BLOCK_NBYTES = 4 * sum(param.numel() for param in WideBlock().parameters())
ROOT_NBYTES = 4 * (8 * WIDTH + WIDTH)
MODEL_NBYTES = NUM_BLOCKS * BLOCK_NBYTES + ROOT_NBYTES
# Small parameters are moved by index: 4 bytes an element of two indices, and int64 temporaries while they are made.
NUM_SMALL = NUM_BLOCKS * 2 * WIDTH + 8 * WIDTH + WIDTH
INDEX_NBYTES = NUM_SMALL * (2 * 4 + 3 * 8)
NUM_TENSORS = 4 * NUM_BLOCKS + 2
# torch.chunk gives a rank at most a row of every tensor more; spans are padded to whole cache lines.
SHARD_SLACK_NBYTES = NUM_TENSORS * (4 * WIDTH + ALIGN_NBYTES)


def _allocations(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What `run` returns, and the bytes of every allocation (positive) and free (negative) meanwhile, in order."""
    gc.collect()
    gc.disable()  # what earlier tests have left must not be freed meanwhile
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = run()
    finally:
        gc.enable()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return result, [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def _curve(changes: list[int]) -> list[int]:
    total, curve = 0, []
    for change in changes:
        total += change
        curve.append(total)
    return curve


def _build_and_shard() -> tuple[nn.Module, FullyShardedEngine]:
    model = seeded(WideNet)
    torch.empty(MARKER_NBYTES, dtype=torch.uint8)
    return model, shard(model)


def _setup_curve(world_size: int) -> tuple[list[int], int, int]:
    """Live bytes while a module is sharded, from its plain state on; those before; bytes of the shards.

    On a group without other ranks: what gloo's threads free, the profiler does not see.
    """
    with fake_group(world_size, rank=0):
        _build_and_shard()  # what torch makes once in a process is not the engine's
        (_, engine), changes = _allocations(_build_and_shard)
        curve = _curve(changes)
        at = changes.index(MARKER_NBYTES)
        return curve[at + 2 :], curve[at - 1], engine.live_nbytes["sharded_param"]


@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_setup_needs_the_module_its_shards_and_one_unit(ranks: RankPool, world_size: int) -> None:
    for curve, plain_nbytes, sharded_nbytes in ranks.run(_setup_curve, 1, world_size):
        assert MODEL_NBYTES <= plain_nbytes < MODEL_NBYTES + 1024
        assert max(curve) <= plain_nbytes + sharded_nbytes + BLOCK_NBYTES + INDEX_NBYTES
        assert max(curve) >= plain_nbytes + sharded_nbytes // NUM_BLOCKS, "the allocator was watched"


@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_after_setup_only_the_shards_are_left(ranks: RankPool, world_size: int) -> None:
    for curve, _, sharded_nbytes in ranks.run(_setup_curve, 1, world_size):
        assert sharded_nbytes <= curve[-1] <= sharded_nbytes + INDEX_NBYTES
        assert abs(sharded_nbytes - MODEL_NBYTES // world_size) <= SHARD_SLACK_NBYTES


def _visible_nbytes() -> tuple[int, int]:
    """Bytes of all tensors that Python can reach, more than before a model was built and sharded; of its shards."""
    gc.collect()
    before = _storage_nbytes(_all_tensors())
    _, engine = _build_and_shard()
    gc.collect()
    return _storage_nbytes(_all_tensors()) - before, engine.live_nbytes["sharded_param"]


def _all_tensors() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_tensor_keeps_the_whole_model(ranks: RankPool, world_size: int) -> None:
    for visible, sharded_nbytes in ranks.run(_visible_nbytes, world_size):
        assert sharded_nbytes <= visible <= sharded_nbytes + INDEX_NBYTES


def _is_kept_after_its_last_use(with_training: bool) -> tuple[bool, bool]:
    """Whether an engine and its module outlive the last name for them."""
    model = seeded(WideNet)
    engine = shard(model)
    if with_training:
        model(torch.ones(1, 8)).sum().backward()
    references = weakref.ref(engine), weakref.ref(model)
    del engine, model
    gc.collect()
    return references[0]() is not None, references[1]() is not None


@pytest.mark.parametrize("with_training", [False, True])
def test_an_engine_that_nobody_names_any_more_is_freed(ranks: RankPool, with_training: bool) -> None:
    assert ranks.run(_is_kept_after_its_last_use, 2, with_training) == [(False, False)] * 2


def _record_steps(num_steps: int, units: Any, **config: Any) -> tuple[list[Recorder], int]:
    """A recorder for every step, and what is unsharded at the end."""
    model = seeded(WideNet)
    engine = shard(model, units=units, **config)
    recorders = []
    for _ in range(num_steps):
        model.zero_grad()
        with engine.record() as recorder:
            model(torch.ones(1, 8)).sum().backward()
        recorders.append(recorder)
    return recorders, unsharded_nbytes(engine)


@pytest.mark.parametrize("prefetch_limit", [0, 1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_holds_the_root_unit_and_one_block_more_than_the_limit(
    ranks: RankPool, world_size: int, prefetch_limit: int
) -> None:
    for recorders, nbytes_left in ranks.run(_record_steps, world_size, 3, "auto", prefetch_limit=prefetch_limit):
        peaks = [recorder.peak_nbytes["unsharded_param"] for recorder in recorders]
        assert peaks == [ROOT_NBYTES + num * BLOCK_NBYTES for num in (1, 1 + prefetch_limit, 1 + prefetch_limit)]
        assert nbytes_left == 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_holds_reduce_buffers_of_at_most_one_unit(ranks: RankPool, world_size: int) -> None:
    for recorders, _ in ranks.run(_record_steps, world_size, 3, "auto"):
        for recorder in recorders:
            # One peer's part arrives where the result belongs; those of the others, and small parameters, do not.
            others = (world_size - 2) * BLOCK_NBYTES // world_size
            assert others < recorder.peak_nbytes["reduce_buffer"] <= others + BLOCK_NBYTES // 8


def test_reduce_buffers_count_in_the_dtype_of_the_reduction(ranks: RankPool) -> None:
    single, double = (
        ranks.run(_record_steps, 2, 1, "auto", reduce_dtype=dtype)[0][0][0].peak_nbytes["reduce_buffer"]
        for dtype in (torch.float32, torch.float64)
    )
    whole, result = 2 * BLOCK_NBYTES, 2 * BLOCK_NBYTES // 2
    assert single < BLOCK_NBYTES // 8
    assert whole + result <= double < (whole + result) * 9 // 8


@pytest.mark.parametrize("prefetch_limit", [0, 1])
def test_a_step_holds_unsharded_gradients_of_at_most_two_units_and_the_root_unit(
    ranks: RankPool, prefetch_limit: int
) -> None:
    for recorders, _ in ranks.run(_record_steps, 2, 3, "auto", prefetch_limit=prefetch_limit):
        for recorder in recorders:
            peak = recorder.peak_nbytes["unsharded_grad"]
            assert BLOCK_NBYTES <= peak <= 2 * BLOCK_NBYTES + ROOT_NBYTES


def _watched_step(prefetch_limit: int) -> tuple[int, int]:
    """How far a step rises above what is there before it: as the allocator saw, and as the recorder says."""
    model = seeded(WideNet)
    engine = shard(model, prefetch_limit=prefetch_limit)
    x = torch.ones(1, 8)
    for _ in range(2):  # the step that is watched makes no buffers that stay
        model(x).sum().backward()
    before = sum(engine.live_nbytes.values())
    with engine.record() as recorder:
        _, changes = _allocations(lambda: model(x).sum().backward())
    return max(_curve(changes)), recorder.peak_total_nbytes - before


@pytest.mark.parametrize("prefetch_limit", [0, 2])
def test_the_recorder_tells_what_the_allocator_sees(ranks: RankPool, prefetch_limit: int) -> None:
    # Beside the ledger: activations of one row, copies of small parameters on their way in and out, agreed flags.
    slack = 8 * WIDTH * NUM_BLOCKS * 4 + 4 * (NUM_SMALL * 4 + 2048)
    assert slack < BLOCK_NBYTES / 2
    for seen, told in ranks.run(_watched_step, 2, prefetch_limit):
        assert told <= seen <= told + slack


def _held(stage: str) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and Adam moments, by the storages of the visible tensors."""
    model = seeded(WideNet)
    engine = shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if stage == "local step":
        LocalStep(optimizer, engine.params)
    for _ in range(0 if stage == "before" else 2):
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return {
        "params": _storage_nbytes(list(model.parameters())),
        "grads": _storage_nbytes(grads),
        "moments": _storage_nbytes(moments),
    }


def _storage_nbytes(tensors: list[Tensor]) -> int:
    """Of the storages behind the local tensors, each counted once."""
    locals_ = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {local.untyped_storage()._cdata: local.untyped_storage().nbytes() for local in locals_}
    return sum(storages.values())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", ["before", "after", "local step"])
def test_parameters_gradients_and_moments_take_one_nth_of_the_model_on_every_rank(
    ranks: RankPool, world_size: int, stage: str
) -> None:
    share = MODEL_NBYTES / world_size
    for held in ranks.run(_held, world_size, stage):
        num_moments = 0 if stage == "before" else 2
        assert abs(held["params"] - share) <= SHARD_SLACK_NBYTES
        assert abs(held["grads"] - share * bool(num_moments)) <= SHARD_SLACK_NBYTES
        assert abs(held["moments"] - num_moments * share) <= 2 * SHARD_SLACK_NBYTES


def test_the_first_block_of_an_odd_model_is_what_one_step_at_limit_0_adds_to_its_root_unit(ranks: RankPool) -> None:
    for recorders, units in ranks.run(_record_odd_steps, 3):
        root, *blocks = units
        assert [recorder.peak_nbytes["unsharded_param"] for recorder in recorders] == [root + max(blocks)] * 2


def _record_odd_steps() -> tuple[list[Recorder], list[int]]:
    model = seeded(Net)
    engine = shard(model, prefetch_limit=0)
    recorders = []
    for _ in range(2):
        with engine.record() as recorder:
            model(torch.ones(1, 3, 5)).sum().backward()
        recorders.append(recorder)
    return recorders, [unit.unsharded_nbytes for unit in engine.units]
