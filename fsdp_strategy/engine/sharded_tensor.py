"""What users see of a parameter between its gathers: a tensor that gives right values wherever it is used.

Outside a step it computes on shards where it can; a result that would need a reduction (a norm, a maximum) is reduced
at once, so that reading it never gives one rank's share; and together with plain tensors it is gathered first. In the
per-parameter layout it is a `DTensor`; for the flat one see `flat_tensor`. Inside a step, where models compute, every
use gathers the whole parameter, with autograd: weights that a parent reads, penalties, logged norms. All ranks must do
the same, as with every collective.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map

from fsdp_strategy.engine.cut import RowCut, shard_bounds
from fsdp_strategy.engine.operation_names import ALIASES, NEEDS_A_ROW, RANDOM, asks_only, name_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

GRAD: Any = Tensor.grad  # the descriptor, for reading it of many tensors


class ParamOwner(Protocol):
    """What a parameter asks of the engine that shards it."""

    unit_index: int

    def is_computing(self) -> bool:
        """Whether uses of the parameter are part of a step."""

    def gather(self) -> Tensor:
        """The whole parameter, recorded by autograd where gradients are on. Collective."""

    def before_write(self) -> None:
        """This rank's shard is about to be overwritten: wait until what is sent from it has left."""

    def before_update(self) -> None:
        """All shards are about to be overwritten: nothing gathered from them is up to date any more."""

    def leaf(self) -> Tensor:
        """What autograd knows of the parameter: gradients of the whole arrive there."""

    def grads(
        self, outputs: Any, inputs: Sequence[Tensor], owners: dict[int, Any], **kwargs: Any
    ) -> Sequence[Tensor | None]:
        """`torch.autograd.grad`; by position in `inputs`, the owners of those that are parameters. Collective."""

    def wrote(self, full: Tensor) -> None:
        """The whole parameter has new values, already in this rank's shard."""


class ShardedTensor(Tensor):
    """A sharded parameter, or something computed from one. See the module's documentation."""

    __slots__ = ()
    _local_tensor: Tensor

    @property
    def grad(self) -> Tensor | None:
        """The sharded gradient. Read for every parameter in every step, so without the detour of an operation."""
        with torch._C.DisableTorchFunctionSubclass():
            return cast("Tensor | None", GRAD.__get__(self))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(value, Tensor) and not isinstance(value, DTensor | ShardedTensor):
                value = _share_of(value, self)
            GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @abstractmethod
    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank, recorded by autograd where gradients are on. Collective."""

    @abstractmethod
    def keep(self, full: Tensor) -> None:
        """Copy this rank's elements of the whole tensor `full` into the shard."""

    @abstractmethod
    def like(self, local: Tensor) -> ShardedTensor:
        """`local`, of the shape of this rank's shard and any dtype, as a tensor sharded like this one."""

    @abstractmethod
    def piece(self) -> Tensor:
        """This rank's elements, 1-D, as `join` wants them; 0 elements where another rank has the same ones."""

    @abstractmethod
    def piece_numels(self) -> list[int]:
        """How many elements `piece` has on every rank."""

    @abstractmethod
    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the pieces of all ranks."""

    @abstractmethod
    def lacks_elements(self) -> bool:
        """Whether some rank has no element of it, so that a maximum over its shard is undefined there."""

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
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "data" and getattr(func, "__name__", "") == "__set__":
                return _set_data(*args)
            if func is torch.autograd.grad:
                return _grads(*args, **kwargs)
            if name == "register_hook" and (owner := owner_of(args[0])) is not None:
                return func(owner.leaf(), *args[1:], **kwargs)
            if name in ALIASES:
                return _alias(func(*args, **kwargs), args[0])
            if name.startswith("_foreach_") and name.endswith("_") and _match_by_row(args):
                return _run_lists_in_place(func, args, kwargs)
            if asks_only(func, name):
                return func(*args, **kwargs)
            sharded = list(_sharded_in((args, kwargs)))
            target = args[0] if args else next(iter(kwargs.values()), None)  # `torch.nn.init` passes it by name
            is_in_place = name.endswith("_") and not name.endswith("__") and any(target is s for s in sharded)
            is_filled = name in RANDOM or getattr(func, "__module__", "") == "torch.nn.init"
            if isinstance(kwargs.get("out"), ShardedTensor):
                target, is_in_place, is_filled = kwargs["out"], True, True
            is_step = any(owner is not None and owner.is_computing() for owner in map(owner_of, sharded))
            if is_in_place and (is_step or is_filled or _has_plain((args, kwargs))):
                assert isinstance(target, ShardedTensor)
                return _run_in_place(func, target, args, kwargs)
            if is_in_place and (owner := owner_of(sharded[0])) is not None:
                owner.before_write()
            is_undefined = name in NEEDS_A_ROW and any(tensor.lacks_elements() for tensor in sharded)
            is_recorded = not name.endswith("_like") and any(map(_needs_the_whole, sharded))
            if is_step or is_undefined or is_recorded or _has_plain((args, kwargs)):
                args, kwargs = tree_map(_whole, (args, kwargs))
                return func(*args, **kwargs)
            return tree_map(_finish, func(*args, **kwargs))


class _NotThere:
    """An attribute that a base class has and this one has not."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError


class RowShardedTensor(ShardedTensor, DTensor):
    """Per-parameter layout: a `DTensor` with `Shard(0)`; `Replicate()` where the parameter is 0-d."""

    __slots__ = ()
    # What has it is exchanged as a whole by `module.to(dtype)`, which could not be refused then.
    __tensor_flatten__ = _NotThere()

    @classmethod
    def make(cls, local: Tensor, cut: RowCut, axis: DeviceMesh) -> RowShardedTensor:
        """This rank's rows of a parameter, or of something of its shape."""
        placement = Replicate() if cut.is_replicated else Shard(0)
        shape, stride = torch.Size(cut.spec.shape), cut.spec.stride
        return _watch(DTensor.from_local(local, axis, [placement], run_check=False, shape=shape, stride=stride))

    def _rows_of(self, rank: int) -> tuple[int, int]:
        return shard_bounds(self.shape[0], self.device_mesh.size(), rank)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the whole tensor."""
        return self.placements[0].is_replicate()

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """See `ShardedTensor`."""
        full = DTensor.full_tensor(self, **kwargs)
        return full.clone() if self.is_replicated else full  # the shard itself otherwise

    def keep(self, full: Tensor) -> None:
        """See `ShardedTensor`."""
        if self.is_replicated:
            self._local_tensor.copy_(full)
        else:
            first, last = self._rows_of(self.device_mesh.get_local_rank())
            self._local_tensor.copy_(full[first:last])

    def like(self, local: Tensor) -> ShardedTensor:
        """See `ShardedTensor`."""
        return _watch(
            DTensor.from_local(
                local, self.device_mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride()
            )
        )

    def piece(self) -> Tensor:
        """See `ShardedTensor`."""
        flat = self._local_tensor.detach().contiguous().reshape(-1)
        return flat[:0] if self.is_replicated and self.device_mesh.get_local_rank() else flat

    def piece_numels(self) -> list[int]:
        """See `ShardedTensor`."""
        if self.is_replicated:
            return [self.numel()] + [0] * (self.device_mesh.size() - 1)
        bounds = map(self._rows_of, range(self.device_mesh.size()))
        return [(last - first) * self.shape[1:].numel() for first, last in bounds]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """See `ShardedTensor`."""
        return torch.cat(list(pieces)).reshape(self.shape)

    def lacks_elements(self) -> bool:
        """See `ShardedTensor`."""
        if self.is_replicated or not self.dim():
            return False
        first, last = self._rows_of(self.device_mesh.size() - 1)
        return first == last


def local_of(value: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; a plain tensor itself."""
    return value._local_tensor if isinstance(value, (ShardedTensor, DTensor)) else value


def _watch(tensor: DTensor) -> RowShardedTensor:
    """Turn a sharded `DTensor` into ours, keeping its identity and its place in the graph."""
    tensor.__class__ = RowShardedTensor
    return cast("RowShardedTensor", tensor)


def owner_of(tensor: Tensor) -> ParamOwner | None:
    """What a parameter, or an alias of it, asks about its engine."""
    return tensor.__dict__.get("_owner")


def _sharded_in(value: Any) -> Iterator[ShardedTensor]:
    return (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, ShardedTensor))


def _has_plain(value: Any) -> bool:
    """Whether plain tensors take part that cannot be read as scalars."""
    return any(
        isinstance(leaf, Tensor) and not isinstance(leaf, (ShardedTensor, DTensor)) and leaf.dim()
        for leaf in tree_flatten(value)[0]
    )


def _match_by_row(lists: Sequence[Any]) -> bool:
    """Whether in every row of the lists of tensors all are plain, or all are sharded and cut alike."""
    columns = [column for column in lists if isinstance(column, (list, tuple)) and isinstance(column[0], Tensor)]
    return all(
        len({(type(item), item.shape) if isinstance(item, (ShardedTensor, DTensor)) else None for item in row}) == 1
        for row in zip(*columns, strict=True)
    )


def _local_lists(lists: Sequence[Any]) -> list[Any]:
    return [
        [local_of(item) if isinstance(item, Tensor) else item for item in column]
        if isinstance(column, (list, tuple))
        else column
        for column in lists
    ]


def _run_lists_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """On the shards outside of a step; inside, what computes must see the new values too."""
    owners = [owner for tensor in _sharded_in(args[0]) if (owner := owner_of(tensor)) is not None]
    if not any(owner.is_computing() for owner in owners):
        for owner in {owner.unit_index: owner for owner in owners}.values():
            owner.before_write()
        return func(*_local_lists(args), **kwargs)
    wholes = tree_map(lambda value: _whole(value).detach() if isinstance(value, ShardedTensor) else value, list(args))
    func(*wholes, **kwargs)
    with torch.no_grad():
        for target, full in zip(args[0], wholes[0], strict=True):
            if isinstance(target, ShardedTensor):
                _keep(target, full)
    return None


def _needs_the_whole(tensor: ShardedTensor) -> bool:
    """Whether autograd is to record an operation that only a `DTensor` can record over shards."""
    return torch.is_grad_enabled() and tensor.requires_grad and not isinstance(tensor, DTensor)


def _alias(result: Any, source: Tensor) -> Any:
    """`detach()` and `.data` of a parameter are still that parameter, without its gradient."""
    if isinstance(result, DTensor) and not isinstance(result, ShardedTensor):
        _watch(result)
    if isinstance(result, ShardedTensor):
        result.__dict__["_owner"] = owner_of(source)
    return result


def _grads(outputs: Any, inputs: Sequence[Tensor], **kwargs: Any) -> Sequence[Tensor | None]:
    owners = {
        position: owner
        for position, tensor in enumerate(inputs)
        if isinstance(tensor, ShardedTensor) and (owner := owner_of(tensor)) is not None
    }
    if not owners:
        return torch.autograd.grad(outputs, inputs, **kwargs)
    return next(iter(owners.values())).grads(outputs, inputs, owners, **kwargs)


def _share_of(value: Tensor, target: ShardedTensor) -> Tensor:
    """A whole gradient that the user gives to a sharded parameter, sharded; torch says what is wrong with others."""
    if value.shape != target.shape:
        return value
    share = target.like(torch.empty_like(target._local_tensor, dtype=value.dtype))
    share.keep(value)
    return share


def _set_data(target: ShardedTensor, value: Tensor) -> None:
    """`param.data = value`: new values for the shards. Collective where `value` is whole and a step runs."""
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ValueError(
            f"Expected data of shape {tuple(target.shape)} and {target.dtype} for a sharded parameter, got "
            f"{tuple(value.shape)} and {value.dtype}. Convert the module before the Trainer sets the strategy up."
        )
    if isinstance(value, ShardedTensor):
        if (owner := owner_of(target)) is not None:
            owner.before_write()
        target._local_tensor.copy_(value._local_tensor)
    else:
        _run_in_place(Tensor.copy_, target, (target, value), {})


def _whole(value: Any) -> Any:
    if not isinstance(value, ShardedTensor):
        return value
    owner = owner_of(value)
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
    return _watch(value)


def _run_in_place(func: Callable[..., Any], target: ShardedTensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run on the whole of the target and keep this rank's share."""
    if name_of(func) == "copy_" and _is_whole(args[1], target):
        with torch.no_grad():
            return _keep(target, args[1])
    full = _whole(target).detach()
    args, kwargs = tree_map(lambda value: full if value is target else _whole(value), (args, kwargs))
    func(*args, **kwargs)
    with torch.no_grad():
        return _keep(target, full)


def _is_whole(value: Any, target: ShardedTensor) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor | ShardedTensor) and value.shape == target.shape


def _keep(target: ShardedTensor, full: Tensor) -> ShardedTensor:
    owner = owner_of(target)
    if owner is not None:
        owner.before_write()
    target.keep(full)
    if owner is not None:
        owner.wrote(full)
    return target
