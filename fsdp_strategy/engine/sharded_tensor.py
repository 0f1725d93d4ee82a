"""What users see of a parameter between its gathers: a `DTensor` that gives right values wherever it is used.

Outside a step it computes on shards as `DTensor` does, with two additions: a result that would need a reduction (a
norm, a maximum) is reduced at once, so that reading it never gives one rank's share; and together with plain tensors it
is gathered first. Inside a step, where models compute, every use gathers the whole parameter, with autograd: weights
that a parent reads, penalties, logged norms. All ranks must do the same, as with every collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten, tree_map

from fsdp_strategy.engine.layout import shard_bounds

# Asks only about the tensor itself, or hands it on.
_METADATA = frozenset({
    "__deepcopy__", "__format__", "__hash__", "__len__", "__reduce_ex__", "__repr__", "_is_view", "backward",
    "data_ptr", "dim", "element_size", "full_tensor", "get_device", "has_names", "is_complex", "is_contiguous",
    "is_floating_point", "is_inference", "is_leaf", "is_pinned", "is_same_size", "is_set_to", "ndimension", "nelement",
    "numel",
    "redistribute", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
    "storage_offset", "stride", "to_local", "type", "untyped_storage", "_has_compatible_shallow_copy_type",
})  # fmt: skip
# Same values, other tensor: still the parameter's.
_ALIASES = frozenset({"detach", "data"})
_COMPUTED_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# An error on a rank without rows, and only there.
_NEEDS_A_ROW = frozenset({
    "amax", "amin", "aminmax", "argmax", "argmin", "kthvalue", "max", "median", "min", "mode", "nanmedian", "quantile",
    "topk",
})  # fmt: skip
# In place and random: filled whole, so that equal generators give equal weights at every number of ranks.
_RANDOM = frozenset({
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_",
})  # fmt: skip


class ParamOwner(Protocol):
    """What a parameter asks of the engine that shards it."""

    def is_computing(self) -> bool:
        """Whether uses of the parameter are part of a step."""

    def gather(self) -> Tensor:
        """The whole parameter, recorded by autograd where gradients are on. Collective."""

    def wrote(self, full: Tensor) -> None:
        """The whole parameter has new values, already in this rank's shard."""


def show(tensor: DTensor, owner: ParamOwner | None = None) -> ShardedTensor:
    """Turn a sharded `DTensor` into a `ShardedTensor`, keeping its identity and its place in the graph."""
    tensor.__class__ = ShardedTensor
    if owner is not None:
        tensor.__dict__["_owner"] = owner
    assert isinstance(tensor, ShardedTensor)
    return tensor


def write_rows(tensor: DTensor, full: Tensor) -> None:
    """Copy this rank's rows of `full` into the shard."""
    mesh, local = tensor.device_mesh, tensor._local_tensor
    if tensor.placements[0].is_replicate():
        local.copy_(full)
    else:
        first, last = shard_bounds(tensor.shape[0], mesh.size(), mesh.get_local_rank())
        local.copy_(full[first:last])


class ShardedTensor(DTensor):
    """A sharded parameter, or something computed from one. See the module's documentation."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is whole and plain: whoever copies a sharded module wants one that stands alone. Collective."""
        if id(self) not in memo:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                whole = self.full_tensor().clone()
            memo[id(self)] = nn.Parameter(whole, self.requires_grad) if isinstance(self, nn.Parameter) else whole
        copied: Tensor = memo[id(self)]
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on sharded tensors."""
        kwargs = kwargs or {}
        name = _name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ALIASES:
                return _alias(func(*args, **kwargs), args[0])
            if _asks_only(func, name):
                return func(*args, **kwargs)
            sharded = list(_sharded_in((args, kwargs)))
            target = args[0] if args else next(iter(kwargs.values()), None)  # `torch.nn.init` passes it by name
            is_in_place = name.endswith("_") and not name.endswith("__") and any(target is s for s in sharded)
            is_filled = name in _RANDOM or getattr(func, "__module__", "") == "torch.nn.init"
            if isinstance(kwargs.get("out"), ShardedTensor):
                target, is_in_place, is_filled = kwargs["out"], True, True
            is_step = any(owner is not None and owner.is_computing() for owner in map(_owner_of, sharded))
            if is_in_place and (is_step or is_filled or _has_plain((args, kwargs))):
                assert isinstance(target, ShardedTensor)
                return _run_in_place(func, target, args, kwargs)
            is_undefined = name in _NEEDS_A_ROW and any(map(_has_empty_shards, sharded))
            if is_step or is_undefined or _has_plain((args, kwargs)):
                args, kwargs = tree_map(_whole, (args, kwargs))
                return func(*args, **kwargs)
            return tree_map(_finish, func(*args, **kwargs))


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def _asks_only(func: Callable[..., Any], name: str) -> bool:
    is_property = getattr(func, "__name__", "") in ("__get__", "__set__") and name not in _COMPUTED_PROPERTIES
    return is_property or name in _METADATA or name.startswith("_foreach_")


def _owner_of(tensor: Tensor) -> ParamOwner | None:
    return tensor.__dict__.get("_owner")


def _sharded_in(value: Any) -> Iterator[ShardedTensor]:
    return (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, ShardedTensor))


def _has_plain(value: Any) -> bool:
    """Whether plain tensors take part that cannot be read as scalars."""
    return any(
        isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.dim() for leaf in tree_flatten(value)[0]
    )


def _has_empty_shards(tensor: Tensor) -> bool:
    """Whether some rank has no row of it."""
    assert isinstance(tensor, DTensor)
    if tensor.placements[0].is_replicate() or not tensor.dim():
        return False
    num_ranks = tensor.device_mesh.size()
    first, last = shard_bounds(tensor.shape[0], num_ranks, num_ranks - 1)
    return first == last


def _alias(result: Any, source: Tensor) -> Any:
    """`detach()` and `.data` of a parameter are still that parameter, without its gradient."""
    if isinstance(result, DTensor) and not isinstance(result, ShardedTensor):
        show(result, _owner_of(source))
    return result


def _whole(value: Any) -> Any:
    if not isinstance(value, ShardedTensor):
        return value
    owner = _owner_of(value)
    if owner is None or not owner.is_computing():
        return value.full_tensor()
    full = owner.gather()
    return full if value.requires_grad else full.detach()


def _finish(value: Any) -> Any:
    """Reduce what is partial, and keep watching the rest."""
    if not isinstance(value, DTensor) or isinstance(value, ShardedTensor):
        return value
    if any(placement.is_partial() for placement in value.placements):
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
    return show(value)


def _run_in_place(func: Callable[..., Any], target: ShardedTensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run on the whole of the target and keep this rank's rows."""
    full = _whole(target).detach()
    args, kwargs = tree_map(lambda value: full if value is target else _whole(value), (args, kwargs))
    func(*args, **kwargs)
    with torch.no_grad():
        write_rows(target, full)
        owner = _owner_of(target)
        if owner is not None:
            owner.wrote(full)
    return target
