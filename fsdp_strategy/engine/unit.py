"""One unit: its states, its buffers, and the parameters that its modules show.

Sharded, a module shows `ShardedTensor` parameters, views of the unit's shard buffers. Unsharded, it shows plain
parameters, views of one storage that comes and goes as a whole: memory that autograd saved is found again at the same
storage.

[Note: version counters] The unsharded parameters are made with `set_` on the storage, and every refill goes through
aliases made the same way. Each has a version counter of its own, so that a refill is not an in-place operation to
autograd, which compares the counters of what it saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdp_strategy.engine.cut import Cut, Layout, ParamSpec, align
from fsdp_strategy.engine.layout import SpanLayout, plan_span
from fsdp_strategy.engine.mesh import ShardMesh
from fsdp_strategy.engine.operations import GatherOp, Pending
from fsdp_strategy.engine.recorder import Ledger
from fsdp_strategy.engine.sharded_tensor import ShardedTensor
from fsdp_strategy.engine.units import ParamSites, UnitPlan


class UnitState(Enum):
    """Where a unit's full parameters are."""

    SHARDED = auto()  # nowhere: the unsharded storage is empty
    GATHERING = auto()  # arriving: the storage is being written
    UNSHARDED = auto()  # readable, and shown by the modules


_NEXT = {
    UnitState.SHARDED: {UnitState.GATHERING},
    UnitState.GATHERING: {UnitState.UNSHARDED},
    UnitState.UNSHARDED: {UnitState.SHARDED},
}


@dataclass(slots=True, eq=False)
class UnitParam:
    """One parameter of a unit, sharded and unsharded."""

    fqn: str
    sites: list[tuple[nn.Module, str]]
    cut: Cut
    sharded: ShardedTensor  # what the optimizer, checkpoints and users see between steps
    unsharded: nn.Parameter  # plain leaf: what compute sees
    local: Tensor  # view of the shard buffer: (rows, ...), or 1-D in the flat layout; the local tensor of `sharded`
    version: int = 0  # of `unsharded` when it was gathered

    def write_back(self) -> None:
        """Keep this rank's elements of what was written to the unsharded parameter."""
        self.sharded.keep(self.unsharded.detach())


@dataclass(slots=True, eq=False)
class Span:
    """The parameters of one dtype in a unit, with one shard buffer and one region of the unsharded storage."""

    layout: SpanLayout
    params: list[UnitParam]
    shard: Tensor  # (shard_numel,) the parameters' own dtype
    param_dtype: torch.dtype  # gathered and computed in
    gather: GatherOp


class Unit:
    """The parameters that are gathered, computed and freed together."""

    def __init__(
        self, *, fqn: str, index: int, module: nn.Module, spans: list[Span], storage: torch.UntypedStorage,
        is_alias: bool, ledger: Ledger,
    ) -> None:  # fmt: skip
        """See `shard_unit`. `is_alias`: the storage is the shard buffer itself and stays (world size 1)."""
        self.fqn, self.index, self.module, self.spans = fqn, index, module, spans
        self.params = [param for span in spans for param in span.params]
        self._storage, self._storage_nbytes, self._ledger = storage, storage.nbytes(), ledger
        self._is_alias = is_alias
        self._state = UnitState.SHARDED
        self.is_shown = False  # whether the modules show the unsharded parameters
        self._pending: list[Pending] = []
        self._unsent: list[Pending] = []
        self.num_trainable = sum(param.sharded.requires_grad for param in self.params)
        self._swaps: list[tuple[dict[str, Any], str, ShardedTensor, nn.Parameter]] = [
            (module._parameters, name, param.sharded, param.unsharded)
            for param in self.params
            for module, name in param.sites
        ]
        if not is_alias:
            storage.resize_(0)

    @property
    def is_root(self) -> bool:
        """Whether this is the root unit: the parameters in no other unit."""
        return self.fqn == ""

    @property
    def name(self) -> str:
        """For messages."""
        return f"unit `{self.fqn}`" if self.fqn else "the root unit"

    @property
    def state(self) -> UnitState:
        """SHARDED, GATHERING or UNSHARDED."""
        return self._state

    @property
    def numel(self) -> int:
        """Elements of all parameters, unsharded."""
        return sum(span.layout.numel for span in self.spans)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded storage, alignment included, when it is there."""
        return self._storage_nbytes

    def _move_to(self, new: UnitState) -> None:
        if new not in _NEXT[self._state]:
            raise RuntimeError(f"{self.name}: cannot go from {self._state.name} to {new.name}.")
        self._state = new

    def unshard(self) -> None:
        """Allocate the unsharded storage and enqueue the gather. Readable after `wait_for_unshard`."""
        self._move_to(UnitState.GATHERING)
        if not self._is_alias:
            self._storage.resize_(self._storage_nbytes)
            self._ledger.allocate("unsharded_param", self._storage_nbytes)
        self._start_gather()

    def _start_gather(self) -> None:
        self.wait_sent()  # one gather in flight: the next one reuses the tags
        sent_numel = sent_nbytes = num_messages = 0
        with torch.no_grad():
            for span in self.spans:
                shard = span.shard.to(span.param_dtype)  # itself, where it has that dtype
                pending = span.gather.start(shard)
                pending.input_nbytes = 0 if shard is span.shard else shard.nbytes
                self._ledger.allocate("gather_buffer", pending.buffer_nbytes + pending.input_nbytes)
                self._pending.append(pending)
                sent_numel += span.gather.sent_numel
                sent_nbytes += span.gather.sent_numel * span.param_dtype.itemsize
                num_messages += span.gather.num_messages
        self._ledger.event(
            "all_gather", self.fqn, sent_numel=sent_numel, sent_nbytes=sent_nbytes, num_messages=num_messages
        )

    def _finish_gather(self) -> None:
        with torch.no_grad():
            for pending in self._pending:
                pending.wait()
                self._ledger.free("gather_buffer", pending.buffer_nbytes)
        self._unsent, self._pending = self._pending, []
        self._ledger.event("wait_all_gather", self.fqn)

    def wait_for_unshard(self) -> None:
        """Make the unsharded parameters readable on the current stream and show them in the modules."""
        self._finish_gather()
        self._move_to(UnitState.UNSHARDED)
        for param in self.params:
            param.version = param.unsharded._version
        self.show()

    def show(self) -> None:
        """Show the unsharded parameters in the modules."""
        self.sync_requires_grad()
        self.is_shown = True
        for parameters, name, sharded, unsharded in self._swaps:
            if parameters[name] is sharded:  # else `functional_call` has put something of the user's there
                parameters[name] = unsharded

    def hide(self) -> None:
        """Show the sharded parameters in the modules; the unsharded ones stay readable."""
        self.is_shown = False
        for parameters, name, sharded, unsharded in self._swaps:
            if parameters[name] is unsharded:
                parameters[name] = sharded

    def sync_requires_grad(self) -> None:
        """Make trainable, unsharded, what is trainable now: users freeze the parameters that they see."""
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.params:
                is_trainable = param.sharded.requires_grad
                if param.unsharded.requires_grad != is_trainable:
                    param.unsharded.requires_grad_(is_trainable)
                    self.num_trainable = sum(param.sharded.requires_grad for param in self.params)

    def reshard(self) -> None:
        """Show the sharded parameters again and free the unsharded storage."""
        self._move_to(UnitState.SHARDED)
        self.hide()
        for param in self.params:
            if param.unsharded._version != param.version and not self._is_alias:  # edited in place by the user
                self.wait_sent()
                with torch.no_grad():
                    param.write_back()
        if not self._is_alias:
            self._storage.resize_(0)
            self._ledger.free("unsharded_param", self._storage_nbytes)
        self._ledger.event("reshard", self.fqn)

    def regather(self) -> None:
        """Take part in a gather that other ranks need while this rank has the unit unsharded: rewrites equal values."""
        if self._state is UnitState.GATHERING:
            self._finish_gather()
            self._start_gather()
            return
        self._start_gather()
        self._finish_gather()

    def wait_sent(self) -> None:
        """Block until every peer has what this rank sent; the shards may be overwritten afterwards."""
        for pending in self._unsent:
            pending.wait_sent()
            self._ledger.free("gather_buffer", pending.input_nbytes)
        self._unsent.clear()

    def abandon(self) -> None:
        """After an exception: show the shards again, without waiting for anybody. What is in flight goes on."""
        if self._state is UnitState.UNSHARDED:
            self.reshard()
        for param in self.params:
            self.drop_grad(param)

    def drop_grad(self, param: UnitParam) -> None:
        """Let go of an unsharded gradient that is not to be reduced."""
        if param.unsharded.grad is not None:
            self._ledger.free("unsharded_grad", param.unsharded.grad.nbytes)
            param.unsharded.grad = None

    def drain(self) -> None:
        """Wait for a gather that was in flight when the iteration was abandoned, and free what it brought."""
        if self._state is UnitState.GATHERING:
            self.wait_for_unshard()
            self.reshard()
        self.wait_sent()

    def owns_storage_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of the unsharded parameters, and so unreadable once they are freed."""
        return not self._is_alias and tensor.untyped_storage()._cdata == self._storage._cdata


def _dense(param: Tensor) -> Tensor:
    """`param` itself where its memory is dense with dim 0 outermost (contiguous or channels last), else a copy."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(param.dim())
    if param.is_contiguous() or (last is not None and param.is_contiguous(memory_format=last)):
        return param
    return param.contiguous()


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, start: int, shape: tuple[int, ...], stride: tuple[int, ...],
    device: torch.device,
) -> Tensor:  # fmt: skip
    """A tensor over `storage` with a version counter of its own; `start` in elements. See [Note: version counters]."""
    return torch.empty(0, dtype=dtype, device=device).set_(storage, start, shape, stride)


def _move_hooks(param: nn.Parameter, sharded: ShardedTensor, unsharded: nn.Parameter) -> None:
    """Hooks of the user on a gradient see this rank's whole one; those on an accumulated gradient the reduced shard."""
    for hook in (param._backward_hooks or {}).values():
        unsharded.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        sharded.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _shard_param(
    site: ParamSites, position: int, layout: SpanLayout, shard: Tensor, unsharded: Tensor, mesh: ShardMesh
) -> UnitParam:
    """Copy this rank's elements of rank 0's values into the shard buffer, and let go of the full parameter."""
    cut = layout.cuts[position]
    full = _dense(site.param.detach()).to(mesh.device)
    mesh.collectives.broadcast(full)
    local = layout.shard_view(shard, position)
    sharded = mesh.show(cut, local)
    sharded.keep(full)
    sharded.requires_grad_(site.param.requires_grad)
    sharded._is_param = True
    sharded.__dict__.update(site.param.__dict__)  # marks that users put on parameters, read when grouping them
    for module, name in site.sites:
        module._parameters[name] = cast("nn.Parameter", sharded)
    site.param.data = torch.empty(0, dtype=site.param.dtype, device=site.param.device)
    # Hooks are bound to it before `wait_for_unshard` sets what is trainable.
    plain = nn.Parameter(unsharded, requires_grad=unsharded.is_floating_point() or unsharded.is_complex())
    _move_hooks(site.param, sharded, plain)
    return UnitParam(cut.spec.fqn, site.sites, cut, sharded, plain, local)


def _plan(sites: list[ParamSites], param_dtype: torch.dtype, mesh: ShardMesh, layout: Layout) -> SpanLayout:
    specs = tuple(
        ParamSpec(s.fqn, tuple(s.param.shape), tuple(_dense(s.param.detach()).stride()), s.param.is_complex())
        for s in sites
    )
    return plan_span(
        specs, param_dtype.itemsize, layout=layout, shard_world_size=mesh.shard_world_size,
        shard_rank=mesh.shard_rank, policy=mesh.collectives.policy,
    )  # fmt: skip


def _shard_span(
    sites: list[ParamSites], layout: SpanLayout, shard: Tensor, storage: torch.UntypedStorage, start: int,
    param_dtype: torch.dtype, mesh: ShardMesh,
) -> Span:  # fmt: skip
    """Bind a span to its region of the storage, which begins at element `start`, and move its parameters over."""
    unsharded = [
        _view(storage, param_dtype.to_complex(), (start + at) // 2, cut.spec.shape, cut.spec.stride, mesh.device)
        if cut.spec.is_complex
        else _view(storage, param_dtype, start + at, cut.spec.shape, cut.spec.stride, mesh.device)
        for cut, at in zip(layout.cuts, layout.starts, strict=True)
    ]
    params = [_shard_param(site, i, layout, shard, unsharded[i], mesh) for i, site in enumerate(sites)]
    alias = _view(storage, param_dtype, start, (layout.unsharded_numel,), (1,), mesh.device)
    return Span(layout, params, shard, param_dtype, mesh.collectives.bind_gather(layout, alias))


def shard_unit(
    plan: UnitPlan, index: int, mesh: ShardMesh, ledger: Ledger, param_dtypes: dict[str, torch.dtype], layout: Layout
) -> Unit:
    """Replace the parameters of a planned unit by shards. Collective; needs one unsharded unit above what was there.

    Args:
        plan: the unit's parameters, which give up their memory.
        index: position in the engine's list of units, equal on all ranks.
        mesh: where the shards go.
        ledger: told of the bytes.
        param_dtypes: by fqn, the dtype to gather and compute in, where it is not the parameter's own.
        layout: how parameters are cut.
    """
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[ParamSites]] = {}
    for site in plan.params:
        dtype = site.param.dtype.to_real() if site.param.is_complex() else site.param.dtype
        by_dtype.setdefault((dtype, param_dtypes.get(site.fqn, dtype)), []).append(site)
    with torch.inference_mode(False), torch.no_grad():
        layouts = [_plan(sites, param_dtype, mesh, layout) for (_, param_dtype), sites in by_dtype.items()]
        shards = [
            torch.zeros(span.shard_numel, dtype=dtype, device=mesh.device)
            for span, (dtype, _) in zip(layouts, by_dtype, strict=True)
        ]
        ledger.allocate("sharded_param", sum(shard.nbytes for shard in shards))
        is_alias = mesh.shard_world_size == 1 and all(own == param for own, param in by_dtype) and len(by_dtype) == 1
        starts_nbytes = [0]
        for span, (_, param_dtype) in zip(layouts, by_dtype, strict=True):
            starts_nbytes.append(starts_nbytes[-1] + align(span.unsharded_numel * param_dtype.itemsize, 1))
        storage = torch.empty(starts_nbytes[-1], dtype=torch.uint8, device=mesh.device).untyped_storage()
        storage = shards[0].untyped_storage() if is_alias else storage
        spans = [
            _shard_span(sites, span, shard, storage, start // param_dtype.itemsize, param_dtype, mesh)
            for span, shard, start, ((_, param_dtype), sites) in zip(
                layouts, shards, starts_nbytes[:-1], by_dtype.items(), strict=True
            )
        ]
    return Unit(
        fqn=plan.fqn, index=index, module=plan.module, spans=spans, storage=storage, is_alias=is_alias, ledger=ledger
    )
