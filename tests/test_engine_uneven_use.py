"""Ranks that use different parts of the model: what one rank does not use counts as zero, and nobody hangs.

The reference is computed in one process: every rank's gradients, None as zero, averaged; None where no rank has any.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_strategy.engine import LocalStep
from tests.engine_cases import (
    WIDTH,
    Batch,
    Trained,
    assert_close,
    average_grads,
    batches,
    join_grads,
    join_params,
    make_optimizer,
    rank_batches,
    rows_of,
    seeded,
    shard,
    small_net,
    snapshot,
    unsharded_nbytes,
)
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts

NUM_STEPS = 4
# A gradient that a rank reduces in parts is rounded once a part, 2**-24 each; one that is lost or counted twice moves
# parameters by more than 1e-5 here.
TOLERANCE = 1e-6

Path = Sequence[int]  # the blocks that a rank calls, in order
Paths = Sequence[Sequence[Path]]  # per step and rank


class Routed(nn.Module):
    """Calls the blocks it is told to, and one of two heads."""

    def __init__(self) -> None:
        super().__init__()
        net = small_net()
        self.stem, self.blocks = net.stem, net.blocks
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)])

    def forward(self, x: Tensor, path: Path, head: int) -> Tensor:
        x = self.stem(x)
        for index in path:
            x = self.blocks[index](x)
        return self.heads[head](x)


def _loss(model: nn.Module, batch: Batch, path: Path, head: int) -> Tensor:
    x, y = batch
    return (model(x, path, head) - y).square().mean()


def _reference(paths: Paths, heads: Sequence[Sequence[int]]) -> Trained:
    model = seeded(Routed)
    optimizer = make_optimizer("sgd", model.parameters())
    world_size = len(paths[0])
    for step, batch in enumerate(batches(len(paths))):
        optimizer.zero_grad()

        def run(rank: int, step: int = step, batch: Batch = batch) -> None:
            _loss(model, rows_of(batch, rank, world_size), paths[step][rank], heads[step][rank]).backward()

        average_grads(model, run, world_size)
        optimizer.step()
    return snapshot(model)


def _train_routed(paths: Paths, heads: Sequence[Sequence[int]], prefetch_limit: int, native: bool) -> Trained:
    model = seeded(Routed)
    engine = shard(model, prefetch_limit=prefetch_limit, native=native)
    optimizer = make_optimizer("sgd", model.parameters())
    rank = dist.get_rank()
    for step, batch in enumerate(rank_batches(engine, batches(len(paths)))):
        loss = _loss(model, batch, paths[step][rank], heads[step][rank])
        # Some ranks may be in their backward by now: what they reduce must survive this, and what is old must not.
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert unsharded_nbytes(engine) == 0
    return snapshot(model)


ALL = (0, 1, 2)
SAME = [[ALL, ALL]] * NUM_STEPS

CASES: dict[str, Paths] = {
    "one rank always skips a block": [[ALL, (0, 2)]] * NUM_STEPS,
    "one rank skips a block in later steps": [[ALL, ALL], [ALL, ALL], [ALL, (0, 2)], [(1, 2), ALL]],
    "one rank skips a block at first": [[ALL, (1, 2)], [ALL, ALL], [ALL, ALL], [ALL, ALL]],
    "one rank skips all blocks": [[ALL, ()], [ALL, ALL], [(), ALL], [ALL, ALL]],
    "each rank skips another block": [[(0, 1), (1, 2)]] * NUM_STEPS,
    "no rank uses a block": [[(0, 2), (0, 2)]] * NUM_STEPS,
    "no rank uses a block in later steps": [[ALL, ALL], [(0, 2), (0, 2)], [ALL, ALL], [(0, 2), (0, 2)]],
    "ranks call blocks in different order": [[ALL, (2, 1, 0)]] * NUM_STEPS,
    "ranks change the order": [[ALL, ALL], [ALL, (2, 0, 1)], [(1, 0, 2), ALL], [ALL, ALL]],
    "one rank calls a block twice": [[ALL, (0, 1, 1, 2)]] * NUM_STEPS,
    "one rank calls a block twice later": [[ALL, ALL], [ALL, ALL], [ALL, (0, 1, 2, 0)], [ALL, ALL]],
    "both ranks call a block twice": [[(0, 1, 0, 2), (0, 1, 0, 2)]] * NUM_STEPS,
    "three ranks go three ways": [[ALL, (2, 0), (1, 1)], [(0,), ALL, ALL], [ALL, ALL, ALL], [(), (1,), (2, 1, 0)]],
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_take_different_ways_through_the_model_train_on_the_average(ranks: RankPool, case: str) -> None:
    paths = CASES[case]
    heads = [[0] * len(step) for step in paths]
    reference = _reference(paths, heads)
    with ranks.timeout(10):
        results = ranks.run(_train_routed, len(paths[0]), paths, heads, 1, False)
    assert_close(join_params(results, reference), reference.params, TOLERANCE)
    assert_close(join_grads(results, reference), reference.grads, TOLERANCE)


@pytest.mark.parametrize("prefetch_limit", [0, 3])
def test_ways_may_differ_at_any_prefetch_limit(ranks: RankPool, prefetch_limit: int) -> None:
    paths = CASES["ranks change the order"] + CASES["one rank skips a block in later steps"]
    heads = [[0, 0]] * len(paths)
    with ranks.timeout(10):
        results = ranks.run(_train_routed, 2, paths, heads, prefetch_limit, False)
    reference = _reference(paths, heads)
    assert_close(join_params(results, reference), reference.params, TOLERANCE)


def test_ways_may_differ_with_native_collectives(ranks: RankPool) -> None:
    paths = CASES["three ranks go three ways"]
    heads = [[0, 0, 0]] * len(paths)
    with ranks.timeout(10):
        results = ranks.run(_train_routed, 3, paths, heads, 1, True)
    reference = _reference(paths, heads)
    assert_close(join_params(results, reference), reference.params, TOLERANCE)


@pytest.mark.parametrize(
    "heads", [[[0, 1]] * NUM_STEPS, [[0, 0], [0, 0], [0, 1], [1, 1]]], ids=["from the start", "later"]
)
def test_a_head_that_one_rank_uses_gets_half_its_gradient_and_an_unused_one_none(
    ranks: RankPool, heads: list[list[int]]
) -> None:
    reference = _reference(SAME, heads)
    with ranks.timeout(10):
        results = ranks.run(_train_routed, 2, SAME, heads, 1, False)
    assert_close(join_params(results, reference), reference.params, TOLERANCE)
    grads = join_grads(results, reference)
    assert_close(grads, reference.grads, TOLERANCE)
    assert (grads["heads.0.weight"] is None) == (heads[-1] == [1, 1])


def _evaluate(num_batches: Sequence[int]) -> tuple[list[Tensor], int, int]:
    """As a loop of another length on every rank does: begin, forward, end; then take part in what others still do."""
    model = seeded(Routed)
    engine = shard(model)
    seen = []
    with engine.record() as recorder, torch.no_grad():
        for x, _ in batches(num_batches[dist.get_rank()]):
            with engine.iteration("validation"):
                seen.append(model(x, ALL, 0))
        engine.join_while_others_run("validation")
    loss = _loss(model, batches(1)[0], ALL, 0)
    loss.backward()
    return seen, recorder.count("all_gather"), unsharded_nbytes(engine)


@pytest.mark.parametrize("num_batches", [(3, 1), (1, 3), (0, 2), (2, 2), (3, 0, 1)])
def test_ranks_may_have_different_numbers_of_iterations(ranks: RankPool, num_batches: tuple[int, ...]) -> None:
    with ranks.timeout(10):
        results = ranks.run(_evaluate, len(num_batches), num_batches)
    model = seeded(Routed)
    with torch.no_grad():
        expected = [model(x, ALL, 0) for x, _ in batches(max(num_batches))]
    num_units = 4
    for num, (seen, num_gathers, nbytes_left) in zip(num_batches, results, strict=True):
        assert len(seen) == num
        assert all(torch.equal(value, like) for value, like in zip(seen, expected, strict=False))
        assert num_gathers == num_units * max(num_batches), "every rank takes part in every gather"
        assert nbytes_left == 0


def _stale_gathers() -> int:
    """How often a forward without backward saw weights that another rank has updated right after it."""
    model = seeded(small_net)
    engine = shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    LocalStep(optimizer, engine.params)
    x, wrong = batches(1)[0][0], 0
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.0)
    for step in range(40):
        for param in model.parameters():
            param.grad = torch.full_like(param, -1.0)
        out = model(x)  # gradients are on, and no backward follows
        wrong += int(not torch.equal(out.detach(), _out_of(step, x)))
        optimizer.step()
    engine.abandon()
    return wrong


def _out_of(value: float, x: Tensor) -> Tensor:
    """What the net gives when all its parameters have one value."""
    plain = small_net()
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(value)
        return plain(x)


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_update_waits_for_what_is_still_sent_from_the_shards(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_stale_gathers, world_size) == [0] * world_size
