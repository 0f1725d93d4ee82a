"""Give values to a model that was built on the meta device, unit by unit, so that no rank ever holds all of it.

Modules initialise themselves, children first, as their constructors would have done; tied parameters stay tied. Every
rank draws from its own generator, and sharding takes rank 0's values, as for a model built in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_strategy.engine.units import UnitPlan

_CPU = torch.device("cpu")  # where constructors initialise, so that the numbers are theirs


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)


def _is_on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in _own_tensors(module))


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    return None


def check_initialisable(root: nn.Module) -> None:
    """Raise on a module on the meta device that cannot initialise itself. Nothing is allocated.

    Raises:
        ValueError: naming the module and its tensors.
    """
    for fqn, module in root.named_modules():
        if _is_on_meta(module) and _reset_of(module) is None:
            own = {**module._parameters, **module._buffers}
            names = [name for name, tensor in own.items() if tensor is not None and tensor.is_meta]
            raise ValueError(
                f"Expected modules on the meta device to have `reset_parameters()`, got `{fqn or type(root).__name__}` "
                f"({type(module).__name__}), which has none to give values to {', '.join(map(repr, names))}. Define "
                "it, or build the model without `torch.device('meta')`."
            )


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device=_CPU)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    empty.__dict__.update(tensor.__dict__)
    return empty


def materialise(root: nn.Module, plans: Sequence[UnitPlan]) -> Iterator[tuple[int, UnitPlan]]:
    """Give values to what has none, and name the units, with their positions, as soon as they have all of theirs.

    The caller shards a unit before it asks for the next. A module without `reset_parameters` is expected to have been
    refused by `check_initialisable`.
    """
    if not any(_is_on_meta(module) for module in root.modules()):
        yield from enumerate(plans)
        return
    by_module: dict[nn.Module, list[int]] = {}
    for index, plan in enumerate(plans):
        by_module.setdefault(plan.module, []).append(index)
    was_real = {
        module: any(not tensor.is_meta for child in module.modules() for tensor in _own_tensors(child))
        for module in root.modules()
    }
    for module in _children_first(root, set()):
        _give_values(module, is_mixed=was_real[module])
        for index in by_module.get(module, ()):
            yield index, plans[index]


@torch.no_grad()
def _give_values(module: nn.Module, *, is_mixed: bool) -> None:
    """Allocate a module's own tensors and let it initialise itself.

    A module without tensors of its own may initialise those of its children; not where some had values before.
    """
    with torch.inference_mode(False):
        is_on_meta = _is_on_meta(module)
        for tensor in list(_own_tensors(module)):
            if tensor.is_meta:
                # In place: other modules may hold it too.
                torch.utils.swap_tensors(tensor, _empty(tensor))  # type: ignore[no-untyped-call]
        reset = _reset_of(module)
        if reset is not None and (is_on_meta or not is_mixed):
            reset()
