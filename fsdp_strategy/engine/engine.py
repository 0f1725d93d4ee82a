"""Puts the parts together: shard a module in place, and run its iterations.

Without Lightning:

    mesh = ShardMesh(torch.device("cpu"))
    engine = FullyShardedEngine(module, mesh, EngineConfig(prefetch_limit=1))
    optimizer = torch.optim.AdamW(module.parameters())
    module(batch).mean().backward()  # gathers, frees, reduces
    optimizer.step()                 # every rank its own shards
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn

from fsdp_strategy.engine.activation import CheckpointedForward, CheckpointPolicy, find_checkpointed
from fsdp_strategy.engine.agreement import check_equal_models, check_not_lazy, check_params, run_on_all_or_none
from fsdp_strategy.engine.cut import Layout
from fsdp_strategy.engine.hooks import Hooks
from fsdp_strategy.engine.mesh import ShardMesh
from fsdp_strategy.engine.meta_init import check_initialisable, materialise
from fsdp_strategy.engine.order import CollectiveOrder
from fsdp_strategy.engine.recorder import Ledger, Recorder
from fsdp_strategy.engine.reduction import Reducer, ReduceWire
from fsdp_strategy.engine.unit import Unit, UnitParam, UnitState, shard_unit
from fsdp_strategy.engine.unit_cap import fit_to_cap
from fsdp_strategy.engine.units import UnitPlan, UnitPolicy, divide, find_kept, select_units

LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a module is sharded.

    Attributes:
        units: see `find_units`.
        unit_cap_mib: most MiB of parameters in a unit; see `fit_to_cap`. None for no cap.
        reshard_after_forward: whether units are freed between forward and backward; or by FQN pattern of units, True
            for those that match none. False gathers once per step and holds all parameters in between.
        reshard_after_backward: whether units are freed at the end of backward also while micro-batches accumulate
            unsharded. False gathers once for all of them, and holds all parameters meanwhile.
        layout: "per_parameter": every parameter is cut along dim 0 as `torch.chunk` does. "flat": the
            parameters of a unit are laid end to end and cut into equal pieces.
        prefetch_limit: units gathered ahead of the one that computes, in forward and in backward.
        reduce_dtype: in which gradients are summed; None for float32, or the parameter's own dtype where wider.
        reduce_wire: "reduce_dtype", or "param_dtype" to send gradients in the dtype they were computed in: half the
            bytes for 16-bit parameters, and the same sums.
        activation_checkpointing: see `find_checkpointed`.
        param_dtypes: by fqn, the dtype to gather and compute in, where it is not the parameter's own.
    """

    units: UnitPolicy = "auto"
    unit_cap_mib: float | None = None
    reshard_after_forward: bool | dict[str, bool] = True
    reshard_after_backward: bool = True
    layout: Layout = "per_parameter"
    prefetch_limit: int = 1
    reduce_dtype: torch.dtype | None = None
    reduce_wire: ReduceWire = "reduce_dtype"
    activation_checkpointing: CheckpointPolicy = None
    param_dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the choices."""
        if self.layout not in LAYOUTS:
            raise ValueError(f"Expected layout to be one of {', '.join(map(repr, LAYOUTS))}, got {self.layout!r}.")
        if self.reduce_wire not in get_args(ReduceWire):
            raise ValueError(
                f"Expected reduce_wire to be one of {', '.join(map(repr, get_args(ReduceWire)))}, got "
                f"{self.reduce_wire!r}."
            )
        if self.unit_cap_mib is not None and not self.unit_cap_mib > 0:
            raise ValueError(f"Expected unit_cap_mib to be a positive number of MiB, got {self.unit_cap_mib!r}.")
        if type(self.prefetch_limit) is not int or self.prefetch_limit < 0:
            raise ValueError(f"Expected prefetch_limit to be an integer >= 0, got {self.prefetch_limit!r}.")


class FullyShardedEngine:
    """Shards a module in place and keeps it that way between steps.

    Attributes:
        units: in the order of the module tree, the root unit included.
        root_unit: the parameters in no other unit, or None if there are none.
    """

    _live: ClassVar[weakref.WeakSet[FullyShardedEngine]] = weakref.WeakSet()

    @classmethod
    def live(cls) -> list[FullyShardedEngine]:
        """The engines of this process whose modules are still there."""
        return list(cls._live)

    def __init__(self, module: nn.Module, mesh: ShardMesh, config: EngineConfig | None = None) -> None:
        """Shard `module`. Collective: every rank must call it with the same model; rank 0's values win.

        Raises:
            ValueError: on every rank, before anything is changed, if the module cannot be sharded as asked or the
                ranks built different models.
        """
        self.config = config or EngineConfig()
        self.module, self.mesh = module, mesh
        collectives = mesh.collectives
        plans, checkpointed, kept = run_on_all_or_none(collectives, self._plan, f"cannot shard {type(module).__name__}")
        check_equal_models(collectives, plans)
        self._ledger = Ledger()
        self._replaced_params: dict[int, tuple[str, Tensor]] = {
            id(site.param): (site.fqn, site.param) for plan in plans for site in plan.params
        }
        sharded = {
            index: shard_unit(plan, index, mesh, self._ledger, self.config.param_dtypes, self.config.layout)
            for index, plan in materialise(module, plans)
        }
        self.units: list[Unit] = [sharded[index] for index in range(len(plans))]
        self._share_buffers()
        self.root_unit: Unit | None = next((unit for unit in self.units if unit.is_root), None)
        self._reducer = Reducer(
            mesh, self._ledger, reduce_dtype=self.config.reduce_dtype, reduce_wire=self.config.reduce_wire
        )
        self._order = CollectiveOrder(
            self.units, self._reducer, collectives, self._ledger, prefetch_limit=self.config.prefetch_limit
        )
        self._iteration: str | None = None
        self._is_implicit = False
        self._gathered_for: str | None = None  # the kind of iteration whose micro-batches have left units unsharded
        self._hooks = Hooks(
            module, self.units, self._order, self._ledger, kept,
            begin=self._begin_if_none, forward_done=self._forward_done, backward_starts=self._backward_starts,
            end_backward=self._end_backward, settle=self._settle,
        )  # fmt: skip
        self._checkpointed = [CheckpointedForward(child) for child in checkpointed]
        self._live.add(self)

    def _plan(self) -> tuple[list[UnitPlan], list[nn.Module], set[str]]:
        """The units, the modules to checkpoint, and the fqns of the units that stay until backward."""
        check_not_lazy(self.module)
        check_initialisable(self.module)
        config = self.config
        selected, divide_module = select_units(self.module, config.units), functools.partial(divide, self.module)
        if config.unit_cap_mib is None:
            plans = divide_module(selected)
        else:
            plans = fit_to_cap(selected, config.unit_cap_mib * 2**20, divide_module)
        check_params(plans)
        if not plans:
            raise ValueError(f"Expected a module with parameters, got {type(self.module).__name__} without any.")
        checkpointed = find_checkpointed(self.module, config.activation_checkpointing, plans)
        return plans, checkpointed, find_kept(plans, config.reshard_after_forward)

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Move buffers to the device and give every rank rank 0's, as DDP does at construction."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    moved = buffer.to(self.mesh.device).contiguous()
                    self.mesh.collectives.broadcast(moved)
                    module._buffers[name] = moved

    @property
    def shard_world_size(self) -> int:
        """Ranks that share every parameter."""
        return self.mesh.shard_world_size

    @property
    def params(self) -> Iterator[UnitParam]:
        """Every parameter, once."""
        return (param for unit in self.units for param in unit.params)

    def find_replaced(self, param: Tensor) -> str | None:
        """The fqn of a full parameter that a shard has replaced, if `param` is one."""
        fqn, replaced = self._replaced_params.get(id(param), (None, None))
        return fqn if replaced is param else None

    def record(self) -> AbstractContextManager[Recorder]:
        """Record events and peak bytes until the block ends."""
        return self._ledger.record()

    @property
    def live_nbytes(self) -> dict[str, int]:
        """Bytes that the engine holds now, by category."""
        return dict(self._ledger.live_nbytes)

    # -- iterations ---------------------------------------------------------------------------------------------------

    def begin(self, kind: str) -> None:
        """Start an iteration of a kind ("training", "validation", ...): its units are expected in one order.

        The root unit is unsharded until the backward, or the iteration, has ended. Meets all ranks.

        Raises:
            RuntimeError: on every rank, if one begins an iteration of another kind.
        """
        if self._iteration is not None:
            self.end()
        if self._gathered_for not in (None, kind):
            self._free_gathered()
        self._hooks.keep_all = kind if not (self._order.reduces or self.config.reshard_after_backward) else None
        self._hooks.keep_forward = self._hooks.keep_all is not None or self._gathered_for is not None
        suffixes = ("" if self._order.reduces else ", accumulating") + (", gathered" if self._gathered_for else "")
        kind = f"{kind}{suffixes}"
        self._iteration, self._is_implicit = kind, False
        self._order.begin(kind)
        if self.root_unit is not None and self.root_unit.state is not UnitState.UNSHARDED:
            self._order.unshard(self.root_unit)
            self.root_unit.hide()

    def end(self) -> None:
        """End the iteration; everything is sharded afterwards. Meets all ranks if anything was left open."""
        if self._iteration is None:
            return
        self._free_or_keep()
        self._order.end()
        self._iteration = None

    @contextmanager
    def iteration(self, kind: str) -> Iterator[None]:
        """`begin` and `end` around a block; after an exception, `abandon`."""
        self.begin(kind)
        try:
            with self.step():
                yield
        except BaseException:
            self.abandon()
            raise
        self.end()

    def join_while_others_run(self, kind: str) -> None:
        """This rank has no more iterations of the kind: take part in the others' until none has any."""
        self.end()
        self._order.join_while_others_run(kind)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside the block, parameters may be used anywhere: those not unsharded are gathered when they are used."""
        self._hooks.is_step = True
        try:
            yield
        finally:
            self._hooks.is_step = False
            self._hooks.free_accessed()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside the block, backward passes add to whole gradients on this rank; the first one after it reduces all.

        Costs as many bytes as the model has gradients in `reduce_dtype`, and saves the reductions.
        """
        with self._order.reducing(False):
            yield

    @property
    def has_accumulated(self) -> bool:
        """Whether gradients from inside `accumulating` wait for a backward outside of it."""
        return self._reducer.has_accumulated

    def watch_loss(self, loss: Tensor) -> None:
        """Call before `loss.backward()` where recomputation may nest graphs: its end is the end of this graph."""
        self._hooks.watch_loss(loss)

    def abandon(self) -> None:
        """After an exception in forward or backward: sharded again, without meeting anybody.

        Training goes on only if every rank abandons the same iteration.
        """
        self._hooks.reset()
        self._order.abandon()
        self._iteration = self._gathered_for = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block calls of modules gather and free nothing."""
        self._hooks.is_suspended = True
        try:
            yield
        finally:
            self._hooks.is_suspended = False

    def forget_module(self) -> None:
        """Take the hooks off; the caller has given the module other parameters. See `restore`."""
        self._hooks.remove()
        for forward in self._checkpointed:
            forward.remove()
        self._live.discard(self)

    def _begin_if_none(self, kind: str | None = None) -> None:
        if self._iteration is None:
            self.begin(kind or ("forward" if torch.is_grad_enabled() else "forward without gradients"))
            self._is_implicit = True

    def _forward_done(self) -> None:
        if self._is_implicit:
            self.end()

    def _backward_starts(self) -> None:
        self._reducer.in_backward = True

    def _end_backward(self) -> None:
        """The outermost backward has ended: gradients are final when this returns."""
        if self._hooks.keep_all is None:
            self._reshard_all(keep_root=True)
        self._order.close_round()
        self._reducer.in_backward = False
        self._free_or_keep()
        if self._is_implicit:
            self.end()

    def _free_or_keep(self) -> None:
        self._gathered_for = self._hooks.keep_all
        if self._gathered_for is None:
            self._reshard_all()
            return
        for flow in self._hooks.flows:
            if flow.unit.is_shown:
                flow.unit.hide()
            flow.forget_calls()

    def _free_gathered(self) -> None:
        self._gathered_for = None
        self._reshard_all()

    def _settle(self) -> None:
        self._free_gathered()
        if self._is_implicit:
            self.end()
        elif self._iteration is not None:
            self._order.close_round()

    def _reshard_all(self, *, keep_root: bool = False) -> None:
        for flow in self._hooks.flows:
            unit = flow.unit
            if unit.state is UnitState.UNSHARDED and not (keep_root and unit.is_root):
                unit.reshard()
            flow.forget_calls()
