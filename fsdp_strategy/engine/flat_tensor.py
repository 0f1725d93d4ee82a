"""What users see of a parameter in the flat layout: its whole shape, over this rank's 1-D piece.

No `DTensor` placement says "these elements, in memory order", so this is a tensor subclass of its own. Elementwise
operations among tensors that are cut alike run on the pieces, without communication; everything else gathers first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from fsdp_strategy.engine.collectives import Collectives
from fsdp_strategy.engine.cut import FlatCut
from fsdp_strategy.engine.sharded_tensor import ShardedTensor

# Elementwise, though torch does not tag them so.
_ELEMENTWISE = frozenset({
    "_to_copy", "alias", "clone", "copy_", "detach", "empty_like", "fill_", "full_like", "ones_like", "zero_",
    "zeros_like",
})  # fmt: skip
_LIST_REDUCTIONS = frozenset({"_foreach_max", "_foreach_norm", "_foreach_powsum"})


class FlatShardedTensor(ShardedTensor):
    """See the module's documentation."""

    __slots__ = ("_collectives", "_cut", "_local_tensor")
    _collectives: Collectives
    _cut: FlatCut

    @staticmethod
    def make(local: Tensor, cut: FlatCut, collectives: Collectives) -> FlatShardedTensor:
        """This rank's piece of a parameter, or of something of its shape."""
        spec = cut.spec
        tensor = Tensor._make_wrapper_subclass(
            FlatShardedTensor, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device
        )
        tensor._local_tensor, tensor._cut, tensor._collectives = local, cut, collectives
        return tensor

    def full_tensor(self) -> Tensor:
        """See `ShardedTensor`."""
        full: Tensor = _Gather.apply(self)  # type: ignore[no-untyped-call]
        return full

    def to_local(self) -> Tensor:
        """This rank's piece, 1-D."""
        return self._local_tensor

    def keep(self, full: Tensor) -> None:
        """See `ShardedTensor`."""
        self._local_tensor.copy_(self._cut.piece_of(full, self._collectives.shard_rank))

    def like(self, local: Tensor) -> FlatShardedTensor:
        """See `ShardedTensor`."""
        return FlatShardedTensor.make(local, self._cut, self._collectives)

    def piece(self) -> Tensor:
        """See `ShardedTensor`."""
        return self._local_tensor.detach()

    def piece_numels(self) -> list[int]:
        """See `ShardedTensor`."""
        pairs = 2 if self.is_complex() else 1
        return [self._cut.numel(rank) // pairs for rank in range(self._cut.shard_world_size)]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """See `ShardedTensor`."""
        return self._cut.spec.from_memory_order(torch.cat(list(pieces)))

    def lacks_elements(self) -> bool:
        """See `ShardedTensor`. Reductions gather first."""
        return False

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Says what this rank has, without communication."""
        first, last = self._cut.bounds(self._collectives.shard_rank)
        return f"{type(self).__name__}({tuple(self.shape)}, elements [{first}, {last}): {self._local_tensor!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled: one rank's piece is of no use elsewhere."""
        raise TypeError(
            "Expected whole tensors to save, got one rank's piece of a parameter in the flat layout. Save with "
            "trainer.save_checkpoint, or inside `with fsdp_strategy.unshard(module):`."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on pieces if it is elementwise and they match, else on whole tensors."""
        kwargs = kwargs or {}
        if _is_elementwise(func) and _match((*args, *kwargs.values())):
            return _run_on_pieces(func, args, kwargs)
        wholes = {id(tensor): tensor.full_tensor() for tensor in _flat_in((args, kwargs))}
        whole_args, whole_kwargs = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        for tensor in _written(func, args, kwargs):
            tensor.keep(wholes[id(tensor)])
        own = {id(wholes[id(tensor)]): tensor for tensor in _flat_in((args, kwargs))}
        return tree_map(lambda leaf: own.get(id(leaf), leaf), result)


class _Gather(torch.autograd.Function):
    """The whole tensor; every rank's gradient of it is cut, not reduced: all ranks have computed the same."""

    @staticmethod
    def forward(ctx: Any, sharded: FlatShardedTensor) -> Tensor:
        ctx.sharded = sharded
        return sharded._collectives.gather_param(sharded._cut, sharded._local_tensor.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        sharded: FlatShardedTensor = ctx.sharded
        return sharded.like(sharded._cut.piece_of(grad, sharded._collectives.shard_rank).clone())


def _flat_in(value: Any) -> Iterator[FlatShardedTensor]:
    return (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, FlatShardedTensor))


def _is_elementwise(func: Any) -> bool:
    name = func.overloadpacket.__name__
    if name.startswith("_foreach_"):
        return name not in _LIST_REDUCTIONS
    return name in _ELEMENTWISE or torch.Tag.pointwise in func.tags


def _match(values: Sequence[Any]) -> bool:
    """Whether all tensors with elements are pieces cut alike, in lists position by position."""
    columns = [value for value in values if isinstance(value, (list, tuple)) and _has_tensors(value)]
    singles = [value for value in values if _has_elements(value)]
    if not columns:
        return _are_cut_alike(singles)
    return (
        not singles
        and len({len(column) for column in columns}) == 1
        and all(_are_cut_alike([value for value in row if _has_elements(value)]) for row in zip(*columns, strict=True))
    )


def _has_tensors(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def _has_elements(value: Any) -> bool:
    """Whether it is a tensor that is more than a scalar among others."""
    return isinstance(value, Tensor) and (value.dim() > 0 or isinstance(value, FlatShardedTensor))


def _are_cut_alike(tensors: Sequence[Tensor]) -> bool:
    places = {(t.shape, t._cut.start, t._cut.piece_numel) for t in tensors if isinstance(t, FlatShardedTensor)}
    return len(places) == 1 and all(isinstance(t, FlatShardedTensor) for t in tensors)


def _run_on_pieces(func: Any, args: Any, kwargs: Any) -> Any:
    originals = {id(tensor._local_tensor): tensor for tensor in _flat_in((args, kwargs))}
    first = next(_flat_in((args, kwargs)))
    if "memory_format" in kwargs:
        kwargs = {**kwargs, "memory_format": None}  # pieces have one dimension
    local_args, local_kwargs = tree_map(
        lambda v: v._local_tensor if isinstance(v, FlatShardedTensor) else v, (args, kwargs)
    )
    result = func(*local_args, **local_kwargs)
    likes: Iterator[FlatShardedTensor] = iter(args[0] if args and isinstance(args[0], (list, tuple)) else ())

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        like = next(likes, first)
        return originals.get(id(value)) if id(value) in originals else like.like(value)

    return tree_map(wrap, result)


def _written(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Iterator[FlatShardedTensor]:
    """The sharded arguments that the operation's schema says it writes to."""
    schema = func._schema  # type: ignore[attr-defined]
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _flat_in(value)
