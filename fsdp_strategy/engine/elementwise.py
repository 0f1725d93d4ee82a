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

log = logging.getLogger(__name__)

_NUM_STEPS = 12
_ROWS = ((0, 2), (2, 6))  # of the matrix, of two ranks
_ELEMENTS = ((0, 2), (2, 5))  # of the vector


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


def _train_both_ways(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of equal meaning: trained whole, and trained by two ranks with an optimizer each, joined."""
    values, targets = _start(), [value.flip(0) * 2 for value in _start()]
    wholes = _train(optimizer, values, targets)
    ranks = [
        _train(optimizer, [values[0][slice(*rows)], values[1][slice(*elements)]],
               [targets[0][slice(*rows)], targets[1][slice(*elements)]])
        for rows, elements in zip(_ROWS, _ELEMENTS, strict=True)
    ]  # fmt: skip
    for whole, *pieces in zip(wholes, *ranks, strict=True):
        yield whole, torch.cat(pieces)


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise if updating shards with this optimizer differs from updating whole parameters.

    An optimizer that cannot be probed, because its constructor or its step asks for more than parameters and settings,
    is let through with a warning.

    Raises:
        ValueError: naming the optimizer.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            pairs = list(_train_both_ways(optimizer))
        except Exception as error:  # noqa: BLE001 - whatever a constructor or a step of the user's raises
            log.warning(
                "%s could not be probed (%s). If it looks at more than single elements, its results over shards differ "
                "from those over whole parameters.",
                type(optimizer).__name__,
                error,
            )
            return
    # Equal up to rounding: vectorised kernels may round the ends of tensors differently.
    if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs):
        raise ValueError(
            f"Expected an optimizer that treats every element on its own, got {type(optimizer).__name__}, whose result "
            "over shards differs from that over whole parameters. Use an elementwise one, such as AdamW or SGD, or "
            "train with strategy='ddp'."
        )
