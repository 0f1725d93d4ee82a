"""Does an optimizer treat every element on its own? Only then does updating shards equal updating the whole.

Adafactor, Muon, Shampoo or LBFGS look at rows, matrices or all parameters together: over shards they would silently
train something else. So each is probed: a dozen steps on small tensors must give equal values whole and in shards.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_strategy.engine.cut import Layout

log = logging.getLogger(__name__)

_NUM_STEPS = 12
_CUTS = {"per_parameter": (8, 2), "flat": (10, 2)}  # elements of the matrix and the vector that the first rank has


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's settings, as far as its constructor takes them by these names."""
    names = inspect.signature(type(optimizer).__init__).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in names}


def _start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 4, generator=generator), torch.randn(5, generator=generator)]


def _train(optimizer: Optimizer, values: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """The values after every step of an optimizer of the same class and settings, end to end."""
    params = [nn.Parameter(value.clone()) for value in values]
    twin = type(optimizer)(params, **_arguments(optimizer))

    def closure() -> float:
        twin.zero_grad()
        # Bounded slopes, so that no step size diverges; kinks, so that nothing gets to the bottom of it.
        loss = sum((p - t).pow(2).log1p().sum() + 0.5 * p.abs().sum() for p, t in zip(params, targets, strict=True))
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    steps = []
    for _ in range(_NUM_STEPS):
        twin.step(closure)
        steps.append([p.detach().clone() for p in params])
    return [tensor for step in steps for tensor in step]


def _shards(values: Sequence[Tensor], layout: Layout) -> Iterator[list[Tensor]]:
    """The values as each of two ranks has them: rows, or 1-D pieces."""
    for rank in range(2):
        pieces = []
        for value, first in zip(values, _CUTS[layout], strict=True):
            piece = value.flatten()[:first] if rank == 0 else value.flatten()[first:]
            pieces.append(piece.reshape(-1, *value.shape[1:]) if layout == "per_parameter" else piece)
        yield pieces


def check_elementwise(optimizer: Optimizer, layout: Layout = "per_parameter") -> None:
    """Raise if updating shards with this optimizer differs from updating whole parameters.

    An optimizer that cannot be probed, because its constructor or its step asks for more than parameters and settings,
    is let through with a warning.

    Raises:
        ValueError: naming the optimizer.
    """
    name = type(optimizer).__name__
    values, targets = _start(), [value.flip(0) * 2 for value in _start()]
    ranks: list[list[Tensor]] = []
    reason = "whose result over shards differs from that over whole parameters"
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            wholes = _train(optimizer, values, targets)
        except Exception as error:  # noqa: BLE001 - whatever a constructor or a step of the user's raises
            log.warning(
                "%s could not be probed (%s). If it looks at more than single elements, its results over shards differ "
                "from those over whole parameters.",
                name,
                error,
            )
            return
        try:
            pairs = zip(_shards(values, layout), _shards(targets, layout), strict=True)
            ranks = [_train(optimizer, own, own_targets) for own, own_targets in pairs]
        except Exception as error:  # noqa: BLE001
            reason = f"which takes whole parameters and no shards ({error})"
    # Equal up to rounding: vectorised kernels may round the ends of tensors differently.
    if not ranks or not all(
        torch.allclose(whole.flatten(), torch.cat([piece.flatten() for piece in pieces]), rtol=1e-4, atol=1e-6)
        for whole, *pieces in zip(wholes, *ranks, strict=True)
    ):
        raise ValueError(
            f"Expected an optimizer that treats every element on its own, got {name}, {reason}. Use an elementwise "
            "one, such as AdamW or SGD, or train with strategy='ddp'."
        )
