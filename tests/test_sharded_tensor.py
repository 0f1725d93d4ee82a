"""A parameter gives right values wherever it is used: outside steps, in steps, in copies, in backwards of backwards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_strategy import unshard
from tests.engine_cases import assert_close, batches, loss_of, rank_batches, rows_of, seeded, shard, small_net
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts

READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda p: p.norm(),
    "largest": lambda p: p.abs().max(),
    "sum": lambda p: p.sum(),
    "mean_of_data": lambda p: p.data.mean(),
    "rows": lambda p: p.detach().pow(2).sum(0).sum(),
    "with_plain": lambda p: (p.detach() * torch.ones(p.shape)).sum(),
}


def _read(name: str) -> list[tuple[float, float]]:
    model, plain = seeded(small_net), seeded(small_net)
    shard(model)
    read = READS[name]
    return [
        (float(read(p).detach()), float(read(q).detach()))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_reading_a_parameter_between_steps_gives_the_whole_ones_value(
    ranks: RankPool, world_size: int, name: str
) -> None:
    for values in ranks.run(_read, world_size, name):
        for ours, whole in values:
            assert ours == pytest.approx(whole, rel=1e-5, abs=1e-6)  # a sum in another order


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda p: p.clamp_(-0.1, 0.1),
    "renormalise": lambda p: p.div_(p.norm() + 1),
    "copy_of_plain": lambda p: p.copy_(torch.ones(p.shape)),
    "data": lambda p: p.data.mul_(0.5),
    "reinitialise": lambda p: nn.init.normal_(p, std=0.5),
    "out": lambda p: torch.full(p.shape, 0.25, out=p),
}


def _edit(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, plain = seeded(small_net), seeded(small_net)
    shard(model)
    for module in (model, plain):
        torch.manual_seed(11)
        with torch.no_grad():
            for param in module.parameters():
                EDITS[name](param)
    with unshard(model):
        edited = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    return edited, {fqn: p.detach().clone() for fqn, p in plain.named_parameters()}


@pytest.mark.parametrize("name", EDITS)
def test_editing_a_parameter_between_steps_edits_the_whole_one(ranks: RankPool, name: str) -> None:
    for edited, plain in ranks.run(_edit, 3, name):
        assert_close(edited, plain, 1e-6)  # the norm is a sum in another order


def _penalise() -> dict[str, Tensor]:
    """Gradients of a loss with a penalty on all weights, used outside any forward."""
    model = seeded(small_net)
    engine = shard(model)
    grads = {}
    for batch in rank_batches(engine, batches(3)):
        model.zero_grad()
        engine.begin("training")
        with engine.step():
            loss = loss_of(model, batch) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        engine.end()
        grads = {fqn: p.grad.full_tensor() for fqn, p in model.named_parameters() if p.grad is not None}
    return grads


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_penalty_on_all_weights_has_the_gradient_of_one_process(ranks: RankPool, world_size: int) -> None:
    plain = seeded(small_net)
    for batch in batches(3):
        plain.zero_grad()
        (loss_of(plain, batch) + 0.1 * sum(p.pow(2).sum() for p in plain.parameters())).backward()
    expected = {fqn: p.grad for fqn, p in plain.named_parameters() if p.grad is not None}
    for grads in ranks.run(_penalise, world_size):
        assert_close(grads, expected, 1e-5)  # a mean over ranks instead of one over samples


def _copy_deeply() -> tuple[bool, bool, bool]:
    model, plain = seeded(small_net), seeded(small_net)
    engine = shard(model)
    twin = copy.deepcopy(model)
    is_plain = all(type(p) is nn.Parameter for p in twin.parameters())
    is_equal = all(torch.equal(p, q) for p, q in zip(twin.parameters(), plain.parameters(), strict=True))
    (batch,) = rank_batches(engine, batches(1))
    return is_plain, is_equal, torch.equal(loss_of(twin, batch), loss_of(model, batch))


def test_a_deep_copy_is_whole_plain_and_stands_alone(ranks: RankPool) -> None:
    assert ranks.run(_copy_deeply, 3) == [(True, True, True)] * 3


def _penalise_gradients(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    ((output - y).square().mean() + slope.square().sum(1).mean()).backward()


def _train_with_gradient_penalty() -> dict[str, Tensor]:
    model = seeded(small_net)
    engine = shard(model)
    for batch in batches(3):
        model.zero_grad()
        _penalise_gradients(model, *rows_of(batch, dist.get_rank(), dist.get_world_size()))
    assert not any(nbytes for category, nbytes in engine.live_nbytes.items() if "unsharded" in category)
    return {fqn: p.grad.full_tensor() for fqn, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_penalty_has_the_gradient_of_one_process(ranks: RankPool, world_size: int) -> None:
    plain = seeded(small_net)
    for batch in batches(3):
        plain.zero_grad()
        _penalise_gradients(plain, *batch)
    expected = {fqn: p.grad for fqn, p in plain.named_parameters() if p.grad is not None}
    for grads in ranks.run(_train_with_gradient_penalty, world_size):
        assert_close(grads, expected, 1e-5)  # a mean over ranks instead of one over samples


def _keep_gradients() -> bool:
    model = seeded(small_net)
    engine = shard(model)
    first, second = rank_batches(engine, batches(2))
    loss_of(model, first).backward()
    kept = [p.grad for p in model.parameters()]
    values = [grad.to_local().clone() for grad in kept]
    model.zero_grad()
    loss_of(model, second).backward()
    return all(torch.equal(grad.to_local(), value) for grad, value in zip(kept, values, strict=True))


def test_a_gradient_that_the_user_keeps_is_not_overwritten(ranks: RankPool) -> None:
    assert ranks.run(_keep_gradients, 2) == [True, True]


def _train_sparse() -> Tensor:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    engine = shard(model)
    model(torch.tensor([1, 2, 2])).sum().backward()
    grad = next(engine.params).sharded.grad
    assert grad is not None
    return grad.full_tensor()


def test_sparse_gradients_are_reduced_densely(ranks: RankPool) -> None:
    for grad in ranks.run(_train_sparse, 2):
        assert grad.layout == torch.strided
        assert grad.abs().sum(1).nonzero().flatten().tolist() == [1, 2]
