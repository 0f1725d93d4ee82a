"""A kind of model or step, and the proof that it trains right: a plain twin on every rank, beside the sharded model.

The twin is never sharded. Its gradients are averaged over the ranks by hand, None as zero, and None where no rank has
one; whatever a rank does by itself (its branches, its buffers), its twin does too. Losses, the gradients of every step,
whole parameters and buffers must agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_strategy import unshard
from fsdp_strategy.engine import FullyShardedEngine, LocalStep
from tests.engine_cases import (
    Batch,
    assert_close,
    batches,
    loss_of,
    make_optimizer,
    rows_of,
    seeded,
    shard,
    small_net,
    unsharded_nbytes,
)

NUM_STEPS = 4
# Sums over ranks in another order, and what is reduced in parts, round once more, 2**-24 each; a gradient that is lost,
# doubled or divided wrongly is off by more than 1e-4.
TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is trained, and how a step goes.

    Attributes:
        build: the model, before it is sharded.
        loss: of a rank's rows and the number of the step; its backward follows, as in automatic optimization.
        step: instead: leaves gradients itself, as in manual optimization, and returns what to compare.
        between: runs after the optimizer step.
        units: the policy.
    """

    build: Callable[[], nn.Module] = small_net
    loss: Callable[[Any, Batch, int], Tensor] = lambda model, batch, step: loss_of(model, batch)
    step: Callable[[Any, Batch, int], Tensor] | None = None
    between: Callable[[Any, int], None] = lambda model, step: None
    units: Any = "auto"


@dataclass
class History:
    """What a training leaves on a rank; parameters and gradients are whole."""

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def _seed(step: int) -> None:
    torch.manual_seed(100 * step + dist.get_rank())  # both sides draw the same numbers


def _rank_batches() -> list[Batch]:
    return [rows_of(batch, dist.get_rank(), dist.get_world_size()) for batch in batches(NUM_STEPS)]


def _values(named: Any) -> dict[str, Tensor]:
    values = {fqn: tensor.detach().clone() for fqn, tensor in named}
    # float8 cannot be subtracted
    return {fqn: value.float() if "float8" in str(value.dtype) else value for fqn, value in values.items()}


def average_over_ranks(params: Sequence[Tensor]) -> None:
    """Replace `.grad` by the mean over ranks, summed in rank order in float32 or wider."""
    for param in params:
        has_grad = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has_grad)
        if not has_grad:
            continue
        grad = torch.zeros_like(param) if param.grad is None else param.grad.detach().to_dense()
        is_narrow = grad.dtype in (torch.bfloat16, torch.float16)
        flat = torch.view_as_real(grad) if grad.is_complex() else grad
        flat = flat.float() if is_narrow else flat
        parts = [torch.empty(flat.shape, dtype=flat.dtype) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat.contiguous())
        mean = sum(parts[1:], parts[0]) / len(parts)
        mean = torch.view_as_complex(mean) if grad.is_complex() else mean.to(grad.dtype)
        param.grad = torch.empty_like(param).copy_(mean)


def train_twin(kind: Kind) -> History:
    """The plain twin, on every rank."""
    model, history = seeded(kind.build), History()
    optimizer = make_optimizer("sgd", model.parameters())
    for step, batch in enumerate(_rank_batches()):
        _seed(step)
        optimizer.zero_grad()
        if kind.step is None:
            loss = kind.loss(model, batch, step)
            loss.backward()
        else:
            loss = kind.step(model, batch, step)
        average_over_ranks(list(model.parameters()))
        history.losses.append(loss.detach().clone())
        history.grads.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        kind.between(model, step)
    history.params, history.buffers = _values(model.named_parameters()), _values(model.named_buffers())
    return history


def _sharded_step(engine: FullyShardedEngine, kind: Kind, batch: Batch, step: int) -> Tensor:
    """As the strategy runs it."""
    if kind.step is not None:
        with engine.iteration("training"):
            return kind.step(engine.module, batch, step).detach().clone()
    engine.begin("training")
    with engine.step():
        loss = kind.loss(engine.module, batch, step)
    engine.watch_loss(loss)
    loss.backward()
    engine.end()
    return loss.detach().clone()


def train_sharded(kind: Kind) -> History:
    """The sharded model; nothing may stay unsharded after a step."""
    model, history = seeded(kind.build), History()
    engine = shard(model, units=kind.units)
    optimizer = make_optimizer("sgd", model.parameters())
    LocalStep(optimizer, engine.params)
    for step, batch in enumerate(_rank_batches()):
        _seed(step)
        optimizer.zero_grad()
        history.losses.append(_sharded_step(engine, kind, batch, step))
        assert unsharded_nbytes(engine) == 0
        history.grads.append(
            {n: None if p.grad is None else p.grad.full_tensor().clone() for n, p in model.named_parameters()}
        )
        optimizer.step()
        kind.between(model, step)
    with unshard(model):
        history.params, history.buffers = _values(model.named_parameters()), _values(model.named_buffers())
    return history


def _by_step(losses: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {f"loss of step {step}": loss for step, loss in enumerate(losses)}


def assert_trains_as_twin(kind: Kind) -> None:
    """Needs ranks."""
    expected, actual = train_twin(kind), train_sharded(kind)
    assert_close(_by_step(actual.losses), _by_step(expected.losses), TOLERANCE)
    for step, (grads, expected_grads) in enumerate(zip(actual.grads, expected.grads, strict=True)):
        assert_close(
            {f"gradient of {fqn}, step {step}": grad for fqn, grad in grads.items()},
            {f"gradient of {fqn}, step {step}": grad for fqn, grad in expected_grads.items()},
            TOLERANCE,
        )
    assert_close(dict(actual.params), dict(expected.params), TOLERANCE)
    assert actual.buffers.keys() == expected.buffers.keys()
    for fqn, buffer in expected.buffers.items():
        assert actual.buffers[fqn].dtype == buffer.dtype
        torch.testing.assert_close(actual.buffers[fqn], buffer, rtol=TOLERANCE, atol=TOLERANCE)
    assert any(grad is not None and grad.any() for grad in expected.grads[0].values()), "something is trained"
