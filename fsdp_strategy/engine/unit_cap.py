"""Bound the size of units: split those over a cap into the modules inside them, dissolve tiny ones.

A unit's size decides the peak of unsharded memory, and every unit costs a gather and a reduction of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fsdp_strategy.engine.units import UnitPlan, can_be_unit

# Units under this share of the cap are not worth messages of their own.
_TINY_SHARE = 1 / 16


def unit_nbytes(plan: UnitPlan) -> int:
    """Bytes of the unit's parameters, in their own dtypes."""
    return sum(site.param.numel() * site.param.element_size() for site in plan.params)


def _inner_modules(plan: UnitPlan, taken: set[int]) -> dict[str, nn.Module]:
    """The outermost modules inside a unit that could be units and hold some of its parameters; fqns from the root."""
    held = {id(site.param) for site in plan.params}
    found: dict[str, nn.Module] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            fqn = f"{prefix}{name}"
            if id(child) in taken or not any(id(param) in held for param in child.parameters()):
                continue
            if can_be_unit(child):
                found[fqn] = child
            else:
                visit(f"{fqn}.", child)

    visit(f"{plan.fqn}." if plan.fqn else "", plan.module)
    return found


def fit_to_cap(
    selected: Mapping[str, nn.Module], cap_nbytes: float, divide: Callable[[Mapping[str, nn.Module]], list[UnitPlan]]
) -> list[UnitPlan]:
    """Split units over the cap until they fit or hold a single module, then dissolve tiny ones into those around them.

    Args:
        selected: the modules that are to be units, by fqn.
        cap_nbytes: most bytes of parameters in a unit; a single module may have more.
        divide: gives the units for a selection of modules, the root unit included.
    """
    chosen = dict(selected)
    unsplittable: set[str] = set()
    while True:
        plans = divide(chosen)
        over = [plan for plan in plans if unit_nbytes(plan) > cap_nbytes and plan.fqn not in unsplittable]
        if not over:
            break
        for plan in over:
            inner = _inner_modules(plan, {id(module) for module in chosen.values()})
            chosen.update(inner)
            unsplittable.add(plan.fqn)
    return _dissolve_tiny(chosen, cap_nbytes, divide)


def _dissolve_tiny(
    chosen: dict[str, nn.Module], cap_nbytes: float, divide: Callable[[Mapping[str, nn.Module]], list[UnitPlan]]
) -> list[UnitPlan]:
    plans = divide(chosen)
    sizes = {plan.fqn: unit_nbytes(plan) for plan in plans}
    for fqn in sorted(chosen, key=lambda fqn: sizes.get(fqn, 0)):
        size = sizes.get(fqn, 0)
        around = max((other for other in ("", *chosen) if other != fqn and _contains(other, fqn)), key=len)
        if size < _TINY_SHARE * cap_nbytes and sizes.get(around, 0) + size <= cap_nbytes:
            sizes[around] = sizes.get(around, 0) + size
            del chosen[fqn]
    return divide(chosen)


def _contains(outer: str, inner: str) -> bool:
    return not outer or inner.startswith(f"{outer}.")
