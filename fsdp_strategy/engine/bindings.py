"""What modules and tensors hold of the hooks: small objects that can be called, copied and collected."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from fsdp_strategy.engine.flow import UnitFlow
from fsdp_strategy.engine.unit import UnitParam, UnitState

if TYPE_CHECKING:
    from fsdp_strategy.engine.hooks import Hooks


class Owner:
    """Answers a parameter that is used while it is sharded. Does not keep the engine alive."""

    __slots__ = ("hooks", "position", "unit_index")

    def __init__(self, hooks: Hooks, unit_index: int, position: int) -> None:
        self.hooks, self.unit_index, self.position = weakref.ref(hooks), unit_index, position

    def _find(self) -> tuple[Hooks, UnitFlow, UnitParam]:
        hooks = self.hooks()
        assert hooks is not None
        flow = hooks.flows[self.unit_index]
        return hooks, flow, flow.unit.params[self.position]

    def is_computing(self) -> bool:
        """See `ParamOwner`."""
        hooks = self.hooks()
        return hooks is not None and hooks.is_computing

    def gather(self) -> Tensor:
        """See `ParamOwner`."""
        hooks, flow, param = self._find()
        return hooks.access(flow, param)

    def before_write(self) -> None:
        """See `ParamOwner`."""
        _, flow, _ = self._find()
        flow.unit.wait_sent()

    def before_update(self) -> None:
        """See `ParamOwner`."""
        hooks = self.hooks()
        if hooks is not None:
            hooks.before_update()

    def leaf(self) -> Tensor:
        """See `ParamOwner`."""
        _, _, param = self._find()
        return param.unsharded

    def grads(
        self, outputs: Any, inputs: Sequence[Tensor], owners: dict[int, Any], **kwargs: Any
    ) -> Sequence[Tensor | None]:
        """See `ParamOwner`."""
        hooks, leaves, params = self._find()[0], list(inputs), {}
        for position, owner in owners.items():
            _, flow, param = owner._find()
            leaves[position], params[position] = param.unsharded, (flow, param)
        return hooks.grads_of(outputs, leaves, params, **kwargs)

    def wrote(self, full: Tensor) -> None:
        """See `ParamOwner`."""
        _, flow, param = self._find()
        if flow.unit.state is UnitState.UNSHARDED:
            param.unsharded.data.copy_(full)


class _ModuleHook:
    """A copied module is plain and on its own: its copies of our hooks do nothing."""

    __slots__ = ("hooks", "is_outside", "run")

    def __init__(self, hooks: Hooks, run: Callable[..., None]) -> None:
        """`run` is called with what torch passes on, without the module."""
        self.hooks = hooks
        self.is_outside = False  # a `CompiledCall` runs it, so that it is no part of the module's graph
        self.run = _outside_of_graphs(hooks, run)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _do_nothing

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Called by torch."""
        if not self.is_outside and not self.hooks.is_suspended:
            self.run(*args)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """A hook."""


class ModuleHooks:
    """The two hooks of a module, around its call."""

    def __init__(
        self, hooks: Hooks, module: nn.Module, before: Callable[[Any, Any], None], after: Callable[[Any, Any], None]
    ) -> None:
        """Bind `before`, which gets arguments and keyword arguments, and `after`, which gets arguments and output."""
        pre, post = _ModuleHook(hooks, before), _ModuleHook(hooks, after)
        self._removables: list[Any] = [
            module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True),
            module.register_forward_hook(post),
            *([CompiledCall(module, pre, post)] if module._compiled_call_impl is not None else []),
        ]

    def remove(self) -> None:
        """Take them off."""
        for removable in self._removables:
            removable.remove()


def is_compiled(root: nn.Module) -> bool:
    """Whether `torch.compile` has had to do with the module or one inside it."""
    return any(
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or getattr(module, "_compiler_ctx", None) is not None  # of Lightning
        for module in root.modules()
    )


def _outside_of_graphs(hooks: Hooks, function: Callable[..., None]) -> Callable[..., None]:
    """`function`, which `torch.compile` does not trace into; itself, at no cost per call, if nothing is compiled."""
    dynamo = sys.modules.get("torch._dynamo") if hooks.is_compiled else None
    return function if dynamo is None else cast("Callable[..., None]", dynamo.disable(function))


class CompiledCall:
    """Around the call of a module that was compiled in place (`module.compile()`): its hooks are not in the graph."""

    def __init__(self, module: nn.Module, before: _ModuleHook, after: _ModuleHook) -> None:
        """Take the place of the compiled call."""
        self._module, self._before, self._after = module, before, after
        self._compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called by torch in place of the module's hooks and forward."""
        self._before(self._module, args, kwargs)
        self._before.is_outside = self._after.is_outside = True
        try:
            output = self._compiled(*args, **kwargs)
        finally:
            self._before.is_outside = self._after.is_outside = False
        self._after(self._module, args, output)
        return output

    def remove(self) -> None:
        """Give the compiled call its place back."""
        self._module._compiled_call_impl = self._compiled


class Accumulated:
    """Weak, because a cycle through a tensor's hooks is never collected."""

    __slots__ = ("flow", "hooks")

    def __init__(self, hooks: Hooks, flow: UnitFlow) -> None:
        self.hooks, self.flow = weakref.ref(hooks), weakref.ref(flow)

    def __call__(self, param: Tensor) -> None:
        """Called by torch."""
        hooks, flow = self.hooks(), self.flow()
        assert hooks is not None
        assert flow is not None
        hooks.grad_accumulated(flow, param)
