"""Gradients of more than one backward, of frozen parameters, of unusual iterations: what a plain module would have.

Every case is a function that leaves gradients in `.grad`. Two ranks run it on their rows for three steps, with an
optimizer step after each; the reference runs both ranks' rows in one process and averages.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_strategy.engine.cut import shard_bounds
from tests import layouts
from tests.engine_cases import (
    Batch,
    Net,
    SmallBlock,
    Trained,
    assert_close,
    assert_equal,
    average_grads,
    batches,
    join_grads,
    join_params,
    loss_of,
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

NUM_STEPS = 3
# What is reduced in parts is rounded once a part, 2**-24 each; a gradient lost or counted twice is off by over 1e-4.
TOLERANCE = 1e-6


def _halves(batch: Batch) -> list[Batch]:
    (x, y) = batch
    return list(zip(x.chunk(2), y.chunk(2), strict=True))


def _one_backward(model: Net, batch: Batch, step: int) -> None:
    loss_of(model, batch).backward()


def _several_backwards(model: Net, batch: Batch, step: int) -> None:
    for part in (*_halves(batch), batch):
        loss_of(model, part).backward()


def _one_graph_twice(model: Net, batch: Batch, step: int) -> None:
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()


def _two_losses_of_one_forward(model: Net, batch: Batch, step: int) -> None:
    x, y = batch
    out = model(x)
    out.square().mean().backward(retain_graph=True)
    (out * y).mean().backward()


def _two_forwards_one_backward(model: Net, batch: Batch, step: int) -> None:
    first, second = _halves(batch)
    (loss_of(model, first) + 2 * loss_of(model, second)).backward()


def _two_forwards_then_two_backwards(model: Net, batch: Batch, step: int) -> None:
    first, second = (loss_of(model, part) for part in _halves(batch))
    first.backward()
    second.backward()


def _backwards_in_reverse(model: Net, batch: Batch, step: int) -> None:
    first, second = (loss_of(model, part) for part in _halves(batch))
    second.backward()
    first.backward()


def _a_loss_dropped(model: Net, batch: Batch, step: int) -> None:
    if step != 1:
        loss_of(model, batch)
    loss_of(model, batch).backward()


def _evaluation_before_backward(model: Net, batch: Batch, step: int) -> None:
    loss = loss_of(model, batch)
    with torch.no_grad():
        model(batch[0])
    loss.backward()


def _input_gradient_first(model: Net, batch: Batch, step: int) -> None:
    x = batch[0].clone().requires_grad_()
    loss = loss_of(model, (x, batch[1]))
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    (loss * (1 + grad.abs().sum())).backward()


def _modules_called_one_by_one(model: Net, batch: Batch, step: int) -> None:
    x = model.stem(batch[0])
    for block in model.blocks:
        x = block(x)
    (model.head(x) - batch[1]).square().mean().backward()


def _only_a_block(model: Net, batch: Batch, step: int) -> None:
    x = model.stem(batch[0])
    model.blocks[1](x).square().mean().backward()


def _only_the_root_unit(model: Net, batch: Batch, step: int) -> None:
    model.head(model.stem(batch[0])).square().mean().backward()


def _no_backward_in_a_step(model: Net, batch: Batch, step: int) -> None:
    if step == 1:
        with torch.no_grad():
            loss_of(model, batch)
    else:
        loss_of(model, batch).backward()


def _another_length_every_step(model: Net, batch: Batch, step: int) -> None:
    for _ in range(step + 1):
        loss_of(model, batch).backward()


def _freeze_block(model: Net) -> None:
    model.blocks[1].requires_grad_(False)


def _frozen_block(model: Net, batch: Batch, step: int) -> None:
    _freeze_block(model)
    loss_of(model, batch).backward()


def _frozen_parameter(model: Net, batch: Batch, step: int) -> None:
    model.blocks[1].linear.weight.requires_grad_(False)
    loss_of(model, batch).backward()


def _frozen_stem(model: Net, batch: Batch, step: int) -> None:
    model.stem.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    loss_of(model, batch).backward()


def _all_frozen_but_the_head(model: Net, batch: Batch, step: int) -> None:
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    loss_of(model, batch).backward()


def _frozen_then_trained(model: Net, batch: Batch, step: int) -> None:
    model.blocks[1].requires_grad_(step == 1)
    model.stem.weight.requires_grad_(step != 1)
    loss_of(model, batch).backward()


def _frozen_from_the_start(model: Net, batch: Batch, step: int) -> None:
    model.blocks[1].requires_grad_(step > 0)
    model.blocks[2].linear.weight.requires_grad_(step > 1)
    loss_of(model, batch).backward()


Case = Callable[[Net, Batch, int], None]
CASES: dict[str, Case] = {
    case.__name__.strip("_").replace("_", " "): case
    for case in (
        _one_backward, _several_backwards, _one_graph_twice, _two_losses_of_one_forward, _two_forwards_one_backward,
        _two_forwards_then_two_backwards, _backwards_in_reverse, _a_loss_dropped, _evaluation_before_backward,
        _input_gradient_first, _modules_called_one_by_one, _only_a_block, _only_the_root_unit, _no_backward_in_a_step,
        _another_length_every_step, _frozen_block, _frozen_parameter, _frozen_stem, _all_frozen_but_the_head,
        _frozen_then_trained, _frozen_from_the_start,
    )
}  # fmt: skip


def _build(name: str) -> Net:
    model = seeded(small_net)
    if CASES[name] is _frozen_from_the_start:
        model.blocks[1].requires_grad_(False)
        model.blocks[2].linear.weight.requires_grad_(False)
    return model


def _plain_steps(name: str, world_size: int) -> Trained:
    model = _build(name)
    optimizer = make_optimizer("sgd", model.parameters())
    for step, batch in enumerate(batches(NUM_STEPS)):

        def run(rank: int, step: int = step, batch: Batch = batch) -> None:
            CASES[name](model, rows_of(batch, rank, world_size), step)

        average_grads(model, run, world_size)
        optimizer.step()
    return snapshot(model)


def _sharded_steps(name: str) -> tuple[Trained, int]:
    model = _build(name)
    engine = shard(model)
    optimizer = make_optimizer("sgd", model.parameters())
    most_left = 0
    for step, batch in enumerate(rank_batches(engine, batches(NUM_STEPS))):
        optimizer.zero_grad()
        CASES[name](model, batch, step)
        most_left = max(most_left, unsharded_nbytes(engine))
        optimizer.step()
    return snapshot(model), most_left


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_module(ranks: RankPool, name: str) -> None:
    reference = _plain_steps(name, 2)
    with ranks.timeout(10):
        answers = ranks.run(_sharded_steps, 2, name)
    results = [result for result, _ in answers]
    assert_close(join_params(results, reference), reference.params, TOLERANCE)
    assert_close(join_grads(results, reference), reference.grads, TOLERANCE)
    assert [nbytes for _, nbytes in answers] == [0, 0], "nothing stays unsharded after backward"


@pytest.mark.parametrize("name", ["several backwards", "one graph twice", "frozen parameter"])
def test_gradients_are_those_of_the_plain_module_on_one_rank(ranks: RankPool, name: str) -> None:
    reference = _plain_steps(name, 1)
    results = [result for result, _ in ranks.run(_sharded_steps, 1, name)]
    assert_equal(join_params(results, reference), reference.params)


def _step_with_own_grads(own: str) -> Trained:
    """One backward on top of what the user has put into `.grad`."""
    model = seeded(small_net)
    engine = shard(model)
    for index, param in enumerate(model.parameters()):
        if own == "every parameter" or index % 2:
            param.grad = torch.full_like(param, 0.25)
    loss_of(model, rank_batches(engine, batches(1))[0]).backward()
    return snapshot(model)


@pytest.mark.parametrize("own", ["every parameter", "some parameters"])
def test_gradients_are_added_to_what_the_user_put_there(ranks: RankPool, own: str) -> None:
    model = seeded(small_net)
    average_grads(model, lambda rank: loss_of(model, rows_of(batches(1)[0], rank, 2)).backward(), 2)
    for index, param in enumerate(model.parameters()):
        assert param.grad is not None
        param.grad += 0.25 if own == "every parameter" or index % 2 else 0.0
    reference = snapshot(model)
    results = ranks.run(_step_with_own_grads, 2, own)
    assert_close(join_grads(results, reference), reference.grads, TOLERANCE)


def _zeroed_grads(set_to_none: bool) -> tuple[Trained, bool]:
    model = seeded(small_net)
    engine = shard(model)
    optimizer = make_optimizer("sgd", model.parameters())
    is_cleared = True
    for batch in rank_batches(engine, batches(NUM_STEPS)):
        optimizer.zero_grad(set_to_none=set_to_none)
        cleared = [p.grad is None or not p.grad.to_local().count_nonzero() for p in model.parameters()]
        is_cleared = is_cleared and all(cleared)
        loss_of(model, batch).backward()
        optimizer.step()
    return snapshot(model), is_cleared


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_gradients_in_place_or_to_none(ranks: RankPool, set_to_none: bool) -> None:
    reference = _plain_steps("one backward", 2)
    answers = ranks.run(_zeroed_grads, 2, set_to_none)
    assert all(is_cleared for _, is_cleared in answers)
    results = [result for result, _ in answers]
    assert_close(join_params(results, reference), reference.params, TOLERANCE)


def _visible_state() -> list[tuple[str, str, bool, bool, tuple[int, ...]]]:
    """Names; classes; whether parameter and gradient are alike; and have the model's shapes; shapes of the shards."""
    model = seeded(small_net)
    shapes = [param.shape for param in model.parameters()]
    engine = shard(model)
    loss_of(model, rank_batches(engine, batches(1))[0]).backward()
    seen = []
    for (fqn, param), shape in zip(model.named_parameters(), shapes, strict=True):
        grad = param.grad
        assert grad is not None
        same = type(param) is type(grad) and param.to_local().shape == grad.to_local().shape
        if isinstance(param, DTensor):
            assert isinstance(grad, DTensor)
            same = same and param.placements == grad.placements == (Shard(0),)
        seen.append(
            (fqn, type(param).__name__, same, param.shape == grad.shape == shape, tuple(param.to_local().shape))
        )
    return seen


def test_parameters_and_gradients_keep_their_names_and_shapes_over_this_ranks_shard(ranks: RankPool) -> None:
    named = dict(small_net().named_parameters())
    for rank, seen in enumerate(ranks.run(_visible_state, 3)):
        assert [fqn for fqn, *_ in seen] == list(named)
        assert all(same and has_its_shape for _, _, same, has_its_shape, _ in seen)
        if layouts.current() == "flat":
            assert {cls for _, cls, *_ in seen} == {"FlatShardedTensor"}
            assert {len(shape) for *_, shape in seen} == {1}
        else:
            assert {cls for _, cls, *_ in seen} == {"RowShardedTensor"}
            rows = [shard_bounds(param.shape[0], 3, rank) for param in named.values()]
            assert [shape[0] for *_, shape in seen] == [last - first for first, last in rows]


class Chained(nn.Module):
    """Blocks and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SmallBlock(5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _two_models() -> tuple[Trained, Trained]:
    """One model's output is the other's input; both are sharded by engines of their own."""
    first, second = seeded(Chained, seed=1), seeded(small_net)
    shard(first)
    engine = shard(second)
    optimizers = [make_optimizer("sgd", model.parameters()) for model in (first, second)]
    for x, y in rank_batches(engine, batches(2)):
        (second(first(x)) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(first), snapshot(second)


def test_a_graph_may_run_through_two_sharded_models(ranks: RankPool) -> None:
    first, second = seeded(Chained, seed=1), seeded(small_net)
    optimizer = make_optimizer("sgd", [*first.parameters(), *second.parameters()])
    for batch in batches(2):
        optimizer.zero_grad()
        both = nn.Sequential(first, second)
        average_grads(both, lambda rank, b=batch, m=both: loss_of(m, rows_of(b, rank, 2)).backward(), 2)
        optimizer.step()
    with ranks.timeout(10):
        results = ranks.run(_two_models, 2)
    for index, reference in enumerate((snapshot(first), snapshot(second))):
        joined = join_params([result[index] for result in results], reference)
        assert_close(joined, reference.params, TOLERANCE)


def _forward_outputs() -> tuple[Tensor, Tensor]:
    model = seeded(small_net)
    shard(model)
    x = batches(1)[0][0]
    trained = model(x)
    with torch.no_grad():
        return trained.detach().clone(), model(x)


def test_a_forward_gives_the_same_with_and_without_gradients(ranks: RankPool) -> None:
    expected = seeded(small_net)(batches(1)[0][0]).detach()
    for with_gradients, without in ranks.run(_forward_outputs, 2):
        assert torch.equal(with_gradients, expected)
        assert torch.equal(without, expected)
