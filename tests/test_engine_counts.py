"""How many collectives a step has, in which order, and when memory comes and goes."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_strategy.engine import Event, Recorder
from tests.engine_cases import (
    BUILDS,
    NUM_BLOCKS,
    Net,
    Trained,
    assert_equal,
    batches,
    loss_of,
    make_optimizer,
    most_unsharded_blocks,
    rank_batches,
    seeded,
    shard,
    small_net,
    train,
    unsharded_nbytes,
)
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts

ROOT = ""
BLOCKS = [f"blocks.{index}" for index in range(NUM_BLOCKS)]


def _record_steps(build: str, num_steps: int, **config: Any) -> list[Recorder]:
    """One recorder per training step; the first step is negotiated."""
    model = seeded(BUILDS[build])
    engine = shard(model, **config)
    optimizer = make_optimizer("sgd", model.parameters())
    recorders = []
    for batch in rank_batches(engine, batches(num_steps)):
        with engine.record() as recorder:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        recorders.append(recorder)
    return recorders


def _gathers_and_reductions(recorders: Sequence[Recorder]) -> list[tuple[int, int]]:
    return [(recorder.count("all_gather"), recorder.count("reduce_scatter")) for recorder in recorders]


def _place(events: Sequence[Event], kind: str, unit: str, nth: int = 0) -> int:
    """Position of the nth event of a kind for a unit."""
    return [place for place, event in enumerate(events) if (event.kind, event.unit) == (kind, unit)][nth]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_gathers_blocks_twice_and_the_root_unit_once_and_reduces_each_once(
    ranks: RankPool, world_size: int, native: bool
) -> None:
    for recorders in ranks.run(_record_steps, world_size, "small net", 3, native=native):
        assert _gathers_and_reductions(recorders) == [(2 * NUM_BLOCKS + 1, NUM_BLOCKS + 1)] * 3
        for recorder in recorders:
            gathered = Counter(event.unit for event in recorder.of_kind("all_gather"))
            assert gathered == {ROOT: 1, **dict.fromkeys(BLOCKS, 2)}
            assert sorted(event.unit for event in recorder.of_kind("reduce_scatter")) == [ROOT, *BLOCKS]


def test_a_model_without_root_unit_gathers_every_unit_twice(ranks: RankPool) -> None:
    for recorders in ranks.run(_record_steps, 2, "chain", 3):
        assert _gathers_and_reductions(recorders) == [(2 * NUM_BLOCKS, NUM_BLOCKS)] * 3


def test_collectives_come_in_the_order_of_forward_then_backward(ranks: RankPool) -> None:
    for recorders in ranks.run(_record_steps, 2, "small net", 3):
        for recorder in recorders:
            assert [event.unit for event in recorder.of_kind("all_gather")] == [ROOT, *BLOCKS, *BLOCKS[::-1]]
            assert [event.unit for event in recorder.of_kind("reduce_scatter")] == [*BLOCKS[::-1], ROOT]


def test_every_rank_records_the_same_collectives(ranks: RankPool) -> None:
    kinds = ("all_gather", "reduce_scatter", "agree")
    recorded = [
        [[(event.kind, event.unit) for event in recorder.of_kind(*kinds)] for recorder in recorders]
        for recorders in ranks.run(_record_steps, 3, "small net", 3)
    ]
    assert recorded[1:] == recorded[:1] * 2


def test_ranks_agree_before_every_collective_of_the_first_step_and_twice_in_later_ones(ranks: RankPool) -> None:
    for recorders in ranks.run(_record_steps, 2, "small net", 3):
        num_collectives = 3 * NUM_BLOCKS + 2
        assert recorders[0].count("agree") > num_collectives
        assert [recorder.count("agree") for recorder in recorders[1:]] == [2, 2], "at its beginning and end"


@pytest.mark.parametrize("prefetch_limit", [1, 2])
def test_the_next_gather_is_under_way_while_a_block_computes_in_forward(ranks: RankPool, prefetch_limit: int) -> None:
    for recorders in ranks.run(_record_steps, 2, "small net", 3, prefetch_limit=prefetch_limit):
        for events in (recorder.events for recorder in recorders[1:]):
            for index, block in enumerate(BLOCKS):
                for ahead in BLOCKS[index + 1 : index + 1 + prefetch_limit]:
                    assert _place(events, "all_gather", ahead) < _place(events, "post_forward", block)


@pytest.mark.parametrize("prefetch_limit", [1, 2])
def test_the_next_gather_is_under_way_while_a_block_computes_in_backward(ranks: RankPool, prefetch_limit: int) -> None:
    for recorders in ranks.run(_record_steps, 2, "small net", 3, prefetch_limit=prefetch_limit):
        for events in (recorder.events for recorder in recorders[1:]):
            for index, block in enumerate(BLOCKS):
                end = min(_place(events, "post_backward", block), _place(events, "reshard", block, 1))
                for ahead in BLOCKS[max(0, index - prefetch_limit) : index]:
                    assert _place(events, "all_gather", ahead, 1) < end


def test_at_limit_0_no_block_is_gathered_before_it_is_needed(ranks: RankPool) -> None:
    for recorders in ranks.run(_record_steps, 2, "small net", 3, prefetch_limit=0):
        for events in (recorder.events for recorder in recorders):
            for before, block in pairwise(BLOCKS):
                assert _place(events, "reshard", before) < _place(events, "all_gather", block)
                assert _place(events, "reshard", block, 1) < _place(events, "all_gather", before, 1)


@pytest.mark.parametrize("prefetch_limit", [0, 1, 2])
def test_the_first_step_gathers_nothing_ahead(ranks: RankPool, prefetch_limit: int) -> None:
    for (recorder,) in ranks.run(_record_steps, 2, "small net", 1, prefetch_limit=prefetch_limit):
        assert most_unsharded_blocks(recorder) == 1


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("prefetch_limit", [0, 1, 2])
def test_at_most_one_block_more_than_the_limit_is_unsharded(
    ranks: RankPool, world_size: int, prefetch_limit: int
) -> None:
    for build in ("small net", "chain"):
        for recorders in ranks.run(_record_steps, world_size, build, 3, prefetch_limit=prefetch_limit):
            most = [most_unsharded_blocks(recorder) for recorder in recorders]
            assert max(most) <= 1 + prefetch_limit
            assert most[1:] == [1 + prefetch_limit] * 2, "from the second step on the limit is used"


def _storage_nbytes_around_forward() -> list[tuple[str, int, int]]:
    """Per block: bytes of its unsharded storage inside its forward and after it."""
    model = seeded(small_net)
    engine = shard(model, prefetch_limit=0)
    seen: list[tuple[str, Tensor, int]] = []
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, args, output, fqn=fqn: seen.append(
                    (fqn, module.weight, module.weight.untyped_storage().nbytes())
                )
            )
    loss_of(model, rank_batches(engine, batches(1))[0]).backward()
    return [(fqn, inside, weight.untyped_storage().nbytes()) for fqn, weight, inside in seen]


def test_the_memory_of_a_freed_unit_is_gone(ranks: RankPool) -> None:
    for seen in ranks.run(_storage_nbytes_around_forward, 2):
        assert [fqn for fqn, _, _ in seen] == ["stem", *(f"{block}.linear" for block in BLOCKS), "head"]
        for _, inside, after in seen:
            assert inside > 0
            assert after == 0


def _nbytes_when_the_next_block_starts() -> list[int]:
    """Bytes of the storage of block k when block k + 1 computes."""
    model = seeded(small_net)
    engine = shard(model, prefetch_limit=0)
    used: list[Tensor] = []
    nbytes: list[int] = []

    def look(module: nn.Module, args: Any) -> None:
        nbytes.extend(weight.untyped_storage().nbytes() for weight in used)
        used[:] = [module.weight]

    for block in model.blocks:
        block.linear.register_forward_pre_hook(look)
    loss_of(model, rank_batches(engine, batches(1))[0])
    return nbytes


def test_a_block_is_freed_before_the_next_one_computes(ranks: RankPool) -> None:
    assert ranks.run(_nbytes_when_the_next_block_starts, 2) == [[0] * (NUM_BLOCKS - 1)] * 2


def _profiled_messages(run: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum("c10d" in event.name or "gloo" in event.name for event in profile.events())


def _messages_of_backward_and_step(optimizer_name: str) -> tuple[int, int]:
    """What a profiler sees of `torch.distributed` in a backward, and in an optimizer step on visible parameters."""
    model = seeded(small_net)
    engine = shard(model)
    optimizer = make_optimizer(optimizer_name, model.parameters())
    loss = loss_of(model, rank_batches(engine, batches(1))[0])
    return _profiled_messages(loss.backward), _profiled_messages(optimizer.step)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_optimizer_step_communicates_nothing(ranks: RankPool, optimizer: str) -> None:
    for num_in_backward, num_in_step in ranks.run(_messages_of_backward_and_step, 2, optimizer):
        assert num_in_backward > 0, "the profiler sees messages"
        assert num_in_step == 0


def _train_at_limit(prefetch_limit: int, native: bool) -> tuple[Trained, int]:
    model = seeded(Net)
    engine = shard(model, prefetch_limit=prefetch_limit, native=native)
    trained = train(model, rank_batches(engine, batches(4)))
    return trained, unsharded_nbytes(engine)


@pytest.mark.parametrize("native", [False, True])
def test_prefetch_never_changes_results(ranks: RankPool, native: bool) -> None:
    without = ranks.run(_train_at_limit, 2, 0, native)
    for prefetch_limit in (1, 2, 5):
        results = ranks.run(_train_at_limit, 2, prefetch_limit, native)
        for (one, nbytes_left), (other, _) in zip(results, without, strict=True):
            assert_equal(one.params, other.params)
            assert one.losses == other.losses
            assert nbytes_left == 0


def _live_nbytes(num_steps: int) -> list[dict[str, int]]:
    model = seeded(small_net)
    engine = shard(model)
    optimizer = make_optimizer("sgd", model.parameters())
    live = []
    for batch in rank_batches(engine, batches(num_steps)):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        live.append(engine.live_nbytes)
    return live


def test_what_the_engine_holds_does_not_grow_from_step_to_step(ranks: RankPool) -> None:
    for live in ranks.run(_live_nbytes, 2, 5):
        assert live == live[:1] * 5
        assert live[0]["sharded_param"] > 0
