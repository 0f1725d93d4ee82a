"""Activations computed again in backward: the same numbers, no more collectives, less memory."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_strategy.engine import restore
from tests.engine_cases import (
    NUM_BLOCKS,
    Net,
    SmallBlock,
    Trained,
    assert_equal,
    batches,
    join_grads,
    join_params,
    loss_of,
    make_optimizer,
    rank_batches,
    seeded,
    shard,
    snapshot,
    train,
    unsharded_nbytes,
)
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts

POLICIES: dict[str, Any] = {
    "units": "units",
    "class name": "SmallBlock",
    "class": SmallBlock,
    "pattern inside units": ["blocks.*.linear"],
    "some units": ["blocks.0", "blocks.2"],
}


class Dropping(SmallBlock):
    """Its recomputation must drop the same elements."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return nn.functional.dropout(super().forward(x) * scale, 0.3)


def _net(block: Callable[[], nn.Module] = SmallBlock) -> Net:
    return Net(block)


def _train(policy: Any, num_steps: int = 4) -> tuple[Trained, int, int, int]:
    """What is trained; gathers and reductions of the last step; bytes left unsharded."""
    model = seeded(_net)
    engine = shard(model, activation_checkpointing=policy)
    data = rank_batches(engine, batches(num_steps))
    train(model, data[:-1])
    with engine.record() as recorder:
        loss_of(model, data[-1]).backward()
    counts = recorder.count("all_gather"), recorder.count("reduce_scatter")
    return snapshot(model), *counts, unsharded_nbytes(engine)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_those_without_and_nothing_is_gathered_twice(ranks: RankPool, policy: str, world_size: int) -> None:
    reference = snapshot(seeded(_net))
    plain = ranks.run(_train, world_size, None)
    checkpointed = ranks.run(_train, world_size, POLICIES[policy])
    for joined in (join_params, join_grads):
        assert_equal(joined([r for r, *_ in checkpointed], reference), joined([r for r, *_ in plain], reference))
    for _, gathers, reductions, left in checkpointed:
        assert (gathers, reductions, left) == (2 * NUM_BLOCKS + 1, NUM_BLOCKS + 1, 0)


def _saved_nbytes(policy: Any) -> int:
    """Bytes of activations that autograd keeps from forward to backward."""
    model = seeded(_net)
    engine = shard(model, activation_checkpointing=policy)
    params = {param.unsharded.untyped_storage()._cdata for param in engine.params}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in params:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, rank_batches(engine, batches(1))[0])
    loss.backward()
    return sum(saved.values())


def test_less_is_kept_for_backward(ranks: RankPool) -> None:
    (plain, _), (checkpointed, _) = ranks.run(_saved_nbytes, 2, None), ranks.run(_saved_nbytes, 2, "units")
    assert checkpointed < plain / 2


def _losses_with_dropout(policy: Any) -> tuple[list[float], Trained]:
    model = seeded(lambda: Net(Dropping))
    engine = shard(model, activation_checkpointing=policy)
    torch.manual_seed(engine.mesh.shard_rank)
    optimizer = make_optimizer("sgd", model.parameters())
    losses = []
    for x, y in rank_batches(engine, batches(3)):
        hidden = model.stem(x)
        for block in model.blocks:
            hidden = block(hidden, scale=1.1)
        loss = (model.head(hidden) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, snapshot(model)


def test_dropout_and_keyword_arguments_are_the_same_in_the_recomputation(ranks: RankPool) -> None:
    reference = snapshot(seeded(lambda: Net(Dropping)))
    plain, checkpointed = ranks.run(_losses_with_dropout, 2, None), ranks.run(_losses_with_dropout, 2, "units")
    assert [losses for losses, _ in plain] == [losses for losses, _ in checkpointed]
    assert_equal(join_params([r for _, r in checkpointed], reference), join_params([r for _, r in plain], reference))


def _copied_and_restored() -> tuple[bool, bool, bool]:
    """Whether a deep copy computes with its own weights; whether it is plain; whether restoring leaves no trace."""
    model = seeded(_net)
    engine = shard(model, activation_checkpointing="units")
    x = batches(1)[0][0]
    twin = copy.deepcopy(model)
    before = model(x).detach()
    with torch.no_grad():
        twin.blocks[0].linear.weight.zero_()
    differs, own_is_unchanged = not torch.equal(twin(x), before), torch.equal(model(x), before)
    restore(engine)
    is_plain = all("forward" not in block.__dict__ for block in model.blocks)
    return differs and own_is_unchanged, type(twin.blocks[0].linear.weight) is nn.Parameter, is_plain


def test_deep_copies_are_plain_and_on_their_own_and_restoring_leaves_no_trace(ranks: RankPool) -> None:
    assert ranks.run(_copied_and_restored, 2) == [(True, True, True)] * 2


def _one_unit() -> str:
    with pytest.raises(ValueError, match="activation") as caught:
        shard(nn.Sequential(nn.Linear(2, 2)), activation_checkpointing="units")
    return str(caught.value)


def test_checkpointing_units_where_there_are_none_is_an_error(ranks: RankPool) -> None:
    assert all("one unit" in message for message in ranks.run(_one_unit, 2))
