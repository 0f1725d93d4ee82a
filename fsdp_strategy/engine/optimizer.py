"""Run an optimizer's update on local tensors while its groups show the sharded parameters.

Between steps `param_groups` and `state` are keyed by the visible parameters, as users, schedulers, `zero_grad` and
checkpoints expect. Around the update they are swapped for plain parameters over the same shards: updates are
elementwise and need no DTensor dispatch, which costs several times the arithmetic of small parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_strategy.engine.engine import FullyShardedEngine
from fsdp_strategy.engine.sharded_tensor import GRAD, ShardedTensor, local_of, owner_of
from fsdp_strategy.engine.unit import UnitParam


def _wrap(value: Any, like: ShardedTensor) -> Any:
    """A state tensor of the shard's shape as a tensor sharded like the parameter; anything else as it is."""
    if not isinstance(value, Tensor) or isinstance(value, ShardedTensor) or value.shape != like._local_tensor.shape:
        return value
    return like.like(value)


def check_holds_shards(optimizer: Optimizer, number: int, engine: FullyShardedEngine) -> None:
    """Raise if the optimizer holds anything but sharded parameters of the engine: it would never be trained.

    Raises:
        ValueError: naming the optimizer, by its `number`, and what it holds.
    """
    sharded = {id(param.sharded) for param in engine.params}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in sharded:
                continue
            fqn = engine.find_replaced(param)
            what = f"the unsharded parameter `{fqn}`" if fqn else f"a tensor of shape {tuple(param.shape)}"
            raise ValueError(
                f"[rank {engine.mesh.shard_rank}] Expected optimizer {number} ({type(optimizer).__name__}) to hold the "
                f"sharded parameters of the module, got {what}, which would never be updated. Build the optimizer in "
                "configure_optimizers from self.parameters() or self.named_parameters()."
            )


def _take_grads(params: Sequence[Tensor], local: Sequence[nn.Parameter]) -> None:
    """Give local parameters the gradients of the visible ones; most have them from the step before."""
    get, put = GRAD.__get__, GRAD.__set__
    for param, mine in zip(params, local, strict=True):
        grad = get(param)
        own = None if grad is None else local_of(grad)
        if get(mine) is not own:
            put(mine, own)


class LocalStep:
    """Swaps local parameters in around `optimizer.step`, after the closure has run."""

    def __init__(self, optimizer: Optimizer, params: Iterable[UnitParam]) -> None:
        """Attach to an optimizer over sharded parameters."""
        self._optimizer = optimizer
        self._locals: dict[Tensor, nn.Parameter] = {}
        with torch.inference_mode(False), torch.no_grad():
            for param in params:
                self._locals[param.sharded] = nn.Parameter(param.local, requires_grad=param.unsharded.requires_grad)
        self._owner = owner_of(next(iter(self._locals))) if self._locals else None  # any: they share one engine
        self._num_shared = 0  # parameters whose state both dictionaries have
        self._lists: list[list[Tensor]] = []  # the visible lists while swapped
        self._visible_state: Any = None
        self._local_state: defaultdict[Tensor, Any] = defaultdict(dict)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._before_state_dict)
        optimizer.register_state_dict_post_hook(self._show_sharded_state)
        optimizer.register_load_state_dict_post_hook(self._take_loaded_state)
        self._take_loaded_state(optimizer)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._swap_back()  # a step that raised has left the local parameters in
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._swap_in()
            return args, kwargs
        wrapped = self._around_closure(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _around_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._swap_back()
            result = closure()
            self._swap_in()
            return result

        return run

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._swap_back()

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self._swap_back()

    def _swap_in(self) -> None:
        optimizer = self._optimizer
        if self._owner is not None:
            self._owner.before_update()
        visible = [group["params"] for group in optimizer.param_groups]
        local = [self._locals_of(params) for params in visible]
        with torch._C.DisableTorchFunctionSubclass():
            for params, mine in zip(visible, local, strict=True):
                _take_grads(params, mine)
        for group, mine in zip(optimizer.param_groups, local, strict=True):
            group["params"] = mine
        self._lists, self._visible_state = visible, optimizer.state
        optimizer.state = self._local_state

    def _locals_of(self, params: Sequence[Tensor]) -> list[nn.Parameter]:
        try:
            return [self._locals[param] for param in params]
        except KeyError:
            raise ValueError(
                "Expected an optimizer over parameters that were there when the strategy was set up, got a new one in "
                f"a group of {type(self._optimizer).__name__}: it is neither sharded nor the same on all ranks. Add it "
                "to the module in __init__, setup or configure_model."
            ) from None

    def _swap_back(self) -> None:
        if not self._lists:
            return
        optimizer, lists = self._optimizer, self._lists
        self._lists = []
        optimizer.state = self._visible_state
        for group, visible in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = visible
        if len(self._local_state) != self._num_shared:  # the optimizer has made state for parameters that had none
            for visible in lists:
                for param in visible:
                    mine = self._locals[param]
                    if mine in self._local_state and param not in optimizer.state:
                        optimizer.state[param] = self._local_state[mine]
            self._num_shared = len(self._local_state)

    def _show_sharded_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """In a state dictionary, state of a shard's shape is sharded like its parameter."""
        params = list(dict.fromkeys(param for group in optimizer.param_groups for param in group["params"]))
        state = {
            index: {name: _wrap(value, params[index]) for name, value in values.items()}
            if isinstance(index, int) and isinstance(values, dict)
            else values
            for index, values in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def _take_loaded_state(self, optimizer: Optimizer) -> None:
        """Keep the local part of the state, shared by the visible and the local dictionary."""
        self._num_shared = 0
        self._local_state.clear()
        for param, values in optimizer.state.items():
            if isinstance(values, dict):
                for name, value in values.items():
                    if isinstance(value, Tensor):
                        values[name] = local_of(value)
            if param in self._locals:
                self._local_state[self._locals[param]] = values
