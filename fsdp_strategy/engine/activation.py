"""Activation checkpointing: a module's activations are freed after forward and computed again in backward.

The module's `forward` is wrapped on the instance, below its hooks. So the hooks of a checkpointed unit run once in
forward, and its recomputation in backward finds the unit unsharded for the backward: nothing is gathered twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_strategy.engine.units import Pattern, UnitPlan, match_modules

CheckpointPolicy = Pattern | Sequence[Pattern] | None


class CheckpointedForward:
    """In place of `module.forward`. A deep copy of the module is plain: it gets a copy of what was there before."""

    def __init__(self, module: nn.Module) -> None:
        """Wrap the forward of `module`, be it its class's or one of its own."""
        self._module = module
        self._own: Callable[..., Any] | None = module.__dict__.get("forward")
        self._forward = module.forward
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run without keeping activations. Where gradients are off, nothing would be kept anyway."""
        return checkpoint(lambda: self._forward(*args, **kwargs), use_reentrant=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copied = memo.get(id(self._module), self._module)
        return type(copied).forward.__get__(copied)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Give the module its forward back."""
        if self._own is None:
            del self._module.__dict__["forward"]
        else:
            self._module.forward = self._own


def find_checkpointed(root: nn.Module, policy: CheckpointPolicy, plans: Sequence[UnitPlan]) -> list[nn.Module]:
    """The modules whose activations are to be computed again.

    Args:
        root: the whole model.
        policy: None for none; "units" for every unit but the root unit; or as `match_modules` takes them.
        plans: the units.

    Raises:
        ValueError: if a name matches nothing, or "units" is asked for and there are none.
    """
    if policy is None:
        return []
    if policy != "units":
        patterns = [policy] if isinstance(policy, (str, type)) else policy
        return [module for _, module in match_modules(root, patterns, "activation_checkpointing", "'units'")]
    modules = [plan.module for plan in plans if not plan.is_root]
    if not modules:
        raise ValueError(
            "Expected units to checkpoint the activations of, got a model that is one unit. Name the units (units=...) "
            "or the classes to checkpoint (activation_checkpointing=[...])."
        )
    return modules
