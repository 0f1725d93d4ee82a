"""Whatever backwards people write, training equals that of plain replicas; see `tests.kinds`."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_strategy.engine.sharded_tensor import ShardedTensor
from tests.engine_cases import (
    Batch,
    Net,
    Trained,
    assert_close,
    average_grads,
    batches,
    join_params,
    loss_of,
    rank_batches,
    rows_of,
    seeded,
    shard,
    small_net,
    snapshot,
)
from tests.kinds import TOLERANCE, Kind, assert_trains_as_twin
from tests.layouts import both_layouts
from tests.rank_pool import RankPool
from tests.test_engine_backwards import CASES

pytestmark = both_layouts


# -- backwards --------------------------------------------------------------------------------------------------------


def _features(model: Net, x: Tensor) -> list[Tensor]:
    """The outputs of stem, blocks and head."""
    outputs = [model.stem(x)]
    for block in model.blocks:
        outputs.append(block(outputs[-1]))
    return [*outputs, model.head(outputs[-1])]


def _retained(model: Net, batch: Batch, step: int) -> Tensor:
    """Two losses of one graph, one backward after the other, and a third of another graph in between."""
    out = model(batch[0])
    first, second = (out - batch[1]).square().mean(), out.abs().mean()
    first.backward(retain_graph=True)
    loss_of(model, batch).backward()
    second.backward()
    return first


def _deeply_supervised(model: Net, batch: Batch, step: int) -> Tensor:
    """A loss at every block."""
    outputs = _features(model, batch[0])
    losses = [0.1 * output.square().mean() for output in outputs[:-1]]
    return torch.stack(losses).sum() + (outputs[-1] - batch[1]).square().mean()


def _stopped_early(model: Net, batch: Batch, step: int) -> Tensor:
    """The loss comes from another depth every step; what comes after it is computed for nothing."""
    return _features(model, batch[0])[1 + step % 4].square().mean()


def _backward_at_every_block(model: Net, batch: Batch, step: int) -> Tensor:
    """Local learning: every block has its own loss and backward."""
    x, total = batch[0], torch.zeros(())
    for module in (model.stem, *model.blocks, model.head):
        x = module(x.detach())
        loss = (x.mean(-1) - batch[1].squeeze(-1)).square().mean()
        loss.backward()
        total += loss.detach()
    return total


def _gradient_of_input(model: Net, batch: Batch, step: int) -> Tensor:
    """Adversarial training: the gradient of the input alone, then a step on the changed input."""
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model, (x, batch[1])), x)
    loss = loss_of(model, (batch[0] + 0.1 * slope.sign(), batch[1]))
    loss.backward()
    return loss


def _gradient_of_features(model: Net, batch: Batch, step: int) -> Tensor:
    """What a saliency map or a loss balancer asks for: gradients of inner outputs, weighing two losses."""
    outputs = _features(model, batch[0])
    first, second = (outputs[-1] - batch[1]).square().mean(), outputs[-1].abs().mean()
    slopes = [torch.autograd.grad(loss, outputs[2], retain_graph=True)[0].norm() for loss in (first, second)]
    loss = first + second * (slopes[0] / (slopes[1] + 1e-4))
    loss.backward()
    return loss


def _penalty(model: Net, batch: Batch, step: int) -> Tensor:
    """WGAN-GP: a second forward, whose gradient's norm is part of the loss."""
    x = (batch[0] * 0.7).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = loss_of(model, batch) + (slope.flatten(1).norm(dim=1) - 1).square().mean()
    loss.backward()
    return loss


def _penalty_every_other_step(model: Net, batch: Batch, step: int) -> Tensor:
    """As StyleGAN's lazy regularisation does."""
    if step % 2:
        return _penalty(model, batch, step)
    loss = loss_of(model, batch)
    loss.backward()
    return loss


def _penalty_of_features(model: Net, batch: Batch, step: int) -> Tensor:
    outputs = _features(model, batch[0])
    slopes = torch.autograd.grad(outputs[-1].sum(), [outputs[1], outputs[3]], create_graph=True)
    loss = (outputs[-1] - batch[1]).square().mean() + sum(slope.square().mean() for slope in slopes)
    loss.backward()
    return loss


def _given_gradients(model: Net, batch: Batch, step: int) -> Tensor:
    """Two outputs at once, with gradients of the user's."""
    outputs = _features(model, batch[0])
    torch.autograd.backward([outputs[2], outputs[-1]], [0.01 * outputs[2].detach(), outputs[-1].detach() - batch[1]])
    return outputs[-1].square().mean()


def _gradients_of_chosen_inputs(model: Net, batch: Batch, step: int) -> Tensor:
    """A backward that stops at a block's input, and one that goes on from there."""
    outputs = _features(model, batch[0])
    middle = outputs[2].detach().requires_grad_()
    loss = (model.head(model.blocks[2](model.blocks[1](middle))) - batch[1]).square().mean()
    loss.backward()
    outputs[2].backward(middle.grad)
    return loss


def _gradients_of_parameters(model: Net, batch: Batch, step: int) -> Tensor:
    """In place of a backward, as meta-learning does."""
    loss = loss_of(model, batch)
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad
    return loss


def _gradients_of_parameters_listed_before(model: Net, batch: Batch, step: int) -> Tensor:
    params = list(model.parameters())
    loss = loss_of(model, batch)
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad
    return loss


def _averaged(slope: Tensor) -> Tensor:
    """Gradients of sharded parameters are averaged over ranks already."""
    if isinstance(slope, ShardedTensor):
        return slope
    total = slope.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _gradients_of_some_parameters(model: Net, batch: Batch, step: int) -> Tensor:
    """Weighs a loss by the gradients of shared layers, then goes backward."""
    loss = loss_of(model, batch)
    shared = [model.stem.weight, model.blocks[1].linear.weight]
    slopes = torch.autograd.grad(loss, shared, retain_graph=True)
    loss = loss / (1 + sum(_averaged(slope).norm() for slope in slopes))
    loss.backward()
    return loss


class Reversed(torch.autograd.Function):
    """The identity, which turns gradients around."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return -0.1 * grad


def _adversarial_head(model: Net, batch: Batch, step: int) -> Tensor:
    x = model.blocks[1](model.blocks[0](model.stem(batch[0])))
    return (model.head(x) - batch[1]).square().mean() + model.blocks[2](Reversed.apply(x)).square().mean()


def _hooked_tensors(model: Net, batch: Batch, step: int) -> Tensor:
    """Hooks of the user on outputs of blocks."""
    outputs = _features(model, batch[0])
    outputs[1].register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    outputs[3].register_hook(lambda grad: 2 * grad)
    return (outputs[-1] - batch[1]).square().mean()


def _weights_hooked() -> nn.Module:
    """Hooks of the user on parameters, there before they are sharded."""
    model = small_net()
    for param in model.parameters():
        param.register_hook(lambda grad: 0.5 * grad)
    return model


Step = Callable[[Net, Batch, int], Tensor]


def _after(case: Callable[[Net, Batch, int], None]) -> Step:
    """A case that returns nothing; its gradients are compared."""

    def step(model: Net, batch: Batch, step: int) -> Tensor:
        case(model, batch, step)
        return torch.zeros(())

    return step


KINDS: dict[str, Kind] = {
    **{
        step.__name__.strip("_").replace("_", " "): Kind(step=step)
        for step in (
            _retained, _backward_at_every_block, _gradient_of_input, _gradient_of_features, _penalty,
            _penalty_every_other_step, _penalty_of_features, _given_gradients, _gradients_of_chosen_inputs,
            _gradients_of_parameters, _gradients_of_parameters_listed_before, _gradients_of_some_parameters,
        )
    },
    **{
        loss.__name__.strip("_").replace("_", " "): Kind(loss=loss)
        for loss in (_deeply_supervised, _stopped_early, _adversarial_head, _hooked_tensors)
    },
    "hooked weights": Kind(build=_weights_hooked),
}  # fmt: skip


def _train(name: str) -> None:
    assert_trains_as_twin(KINDS[name])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_way_of_going_backward_trains_as_in_plain_replicas(ranks: RankPool, world_size: int, name: str) -> None:
    with ranks.timeout(20):
        ranks.run(_train, world_size, name)


def _build(name: str) -> nn.Module:
    model = small_net()
    if name == "frozen from the start":
        model.blocks[1].requires_grad_(False)
    return model


def _train_case(name: str) -> None:
    assert_trains_as_twin(Kind(build=lambda: _build(name), step=_after(CASES[name])))


@pytest.mark.parametrize("name", CASES)
def test_gradients_on_three_ranks_are_those_of_plain_replicas(ranks: RankPool, name: str) -> None:
    with ranks.timeout(20):
        ranks.run(_train_case, 3, name)


# -- hooks on accumulated gradients -----------------------------------------------------------------------------------


def _train_in_backward(is_early: bool) -> tuple[Trained, int]:
    """A hook of the user updates every parameter as soon as its gradient is there, and drops the gradient."""
    model, calls = seeded(small_net), []

    def update(param: Tensor) -> None:
        assert param.grad is not None
        calls.append(param)
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    def listen() -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(update)

    if is_early:
        listen()
    engine = shard(model)
    if not is_early:
        listen()
    for batch in rank_batches(engine, batches(3)):
        loss_of(model, batch).backward()
    assert all(param.grad is None for param in model.parameters())
    return snapshot(model), len(calls)


@pytest.mark.parametrize("is_early", [True, False], ids=["before sharding", "after sharding"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_hook_on_accumulated_gradients_runs_once_a_parameter_and_may_update_it(
    ranks: RankPool, world_size: int, is_early: bool
) -> None:
    model = seeded(small_net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(3):
        average_grads(model, lambda rank, b=batch: loss_of(model, rows_of(b, rank, world_size)).backward(), world_size)
        optimizer.step()
    reference = snapshot(model)
    answers = ranks.run(_train_in_backward, world_size, is_early)
    assert [num_calls for _, num_calls in answers] == [3 * len(reference.params)] * world_size
    assert_close(join_params([result for result, _ in answers], reference), reference.params, TOLERANCE)
