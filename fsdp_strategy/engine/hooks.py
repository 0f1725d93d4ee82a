"""The four hooks of a unit: pre_forward, post_forward, pre_backward, post_backward. Bound once.

[Note: when backward hooks fire] pre_backward is a prehook on the autograd node of every output: unlike a tensor hook it
survives in-place operations on the output. post_backward (the reduction) runs when the last gradient of the unit has
been accumulated, or when the backward of every call has passed. A call has passed when autograd reaches a node that
produced one of its inputs: autograd runs the ready node that was created last, so everything created inside the unit
has run by then, and the unsharded parameters may be freed. What neither event reaches, the end of backward settles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_strategy.engine.bindings import Accumulated, ModuleHooks, Owner, is_compiled
from fsdp_strategy.engine.flow import UnitFlow, in_backward, tensors_in
from fsdp_strategy.engine.order import CollectiveOrder
from fsdp_strategy.engine.recorder import Ledger
from fsdp_strategy.engine.unit import Unit, UnitParam, UnitState

log = logging.getLogger(__name__)

_NODE_KEY = "fsdp_strategy"


class _NodeHook:
    """What happens when autograd reaches a node: calls that took its result have passed, units it ends are needed."""

    __slots__ = ("calls", "hooks", "outputs_of")

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.calls: list[UnitFlow] = []
        self.outputs_of: list[UnitFlow] = []

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        # First free, then gather: at most one block more than the prefetch limit is unsharded.
        for flow in self.calls:
            self.hooks.call_passed(flow)
        for flow in self.outputs_of:
            self.hooks.pre_backward(flow)


class Hooks:
    """Binds the four hooks to the modules of every unit and carries them out."""

    def __init__(
        self, root: nn.Module, units: Sequence[Unit], order: CollectiveOrder, ledger: Ledger, kept: set[str], *,
        begin: Callable[..., None], forward_done: Callable[[], None], backward_starts: Callable[[], None],
        end_backward: Callable[[], None], settle: Callable[[], None],
    ) -> None:  # fmt: skip
        """Bind the hooks; the callbacks belong to the engine.

        Args:
            root: the whole model.
            units: all units, the root unit included.
            order: starts the collectives.
            ledger: told of the hooks.
            kept: fqns of units that stay unsharded from forward to backward.
            begin: a forward starts, or something of a kind that is named; opens an iteration if none is open.
            forward_done: the outermost hooked module has returned and autograd has not recorded it.
            backward_starts: the outermost backward has reached its first unit.
            end_backward: the outermost backward has ended.
            settle: parameters will change while units are unsharded or arriving, after a forward without backward.
        """
        self.order, self._ledger = order, ledger
        self._begin, self._forward_done = begin, forward_done
        self._backward_starts, self._end_backward, self._settle = backward_starts, end_backward, settle
        self.flows = [UnitFlow(unit, keep_between=unit.fqn in kept) for unit in units]
        self.root_flow = next((flow for flow in self.flows if flow.unit.is_root), None)
        self.is_compiled = is_compiled(root)
        self.depth = 0  # nested hooked modules
        self.is_suspended = False  # modules are called with whole parameters that are not ours
        self.is_step = False  # a step of the caller runs, in which parameters may be used anywhere
        self.keep_all: str | None = None  # the kind of iteration, while its micro-batches keep units unsharded
        self.keep_forward = False  # units stay unsharded from forward to backward
        self._accessed: UnitFlow | None = None
        self._creates_graph = False
        self._is_end_queued = False
        self._warned: set[str] = set()
        self._bound: list[ModuleHooks] = []
        bound: set[nn.Module] = set()
        for flow in self.flows:
            bound |= self._bind(flow)
        for module in root.modules():
            if module not in bound and (module is root or any(child in bound for child in module.modules())):
                self._bound.append(ModuleHooks(self, module, self.enter_with, self.leave_with))

    def _bind(self, flow: UnitFlow) -> set[nn.Module]:
        readers = {flow.unit.module}
        if flow.unit.is_root:  # its parameters are read by modules all over the tree, which may be called directly
            readers |= {module for param in flow.unit.params for module, _ in param.sites}
        for module in readers:
            before, after = partial(self.pre_forward, flow), partial(self.post_forward, flow)
            self._bound.append(ModuleHooks(self, module, before, after))
        for position, param in enumerate(flow.unit.params):
            param.sharded.__dict__["_owner"] = Owner(self, flow.unit.index, position)
        for param in flow.unit.params:
            if not param.unsharded.requires_grad:
                continue  # of a dtype that has no gradient
            param.unsharded.register_post_accumulate_grad_hook(Accumulated(self, flow))  # type: ignore[no-untyped-call]
        return readers

    # -- forward ------------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A module that holds units is called.

        The root unit, which is unsharded for the whole step, is shown while modules compute. Between their calls a
        step's own code freezes parameters, clears gradients and lists parameters for autograd: of the sharded ones.
        """
        self._begin()
        self.depth += 1
        if self.depth == 1 and self.root_flow is not None:
            unit = self.root_flow.unit
            if unit.state is UnitState.UNSHARDED and not unit.is_shown:
                unit.show()

    @property
    def is_computing(self) -> bool:
        """Whether models compute now: a hooked module is being called, a step runs, or autograd does."""
        return not self.is_suspended and (self.depth > 0 or self.is_step or in_backward())

    def access(self, flow: UnitFlow, param: UnitParam) -> Tensor:
        """The whole parameter for a use outside its unit's forward; a copy, unless the unit stays for the whole step.

        The unit stays unsharded, though not shown, until another one is needed: its other parameters may be next.
        """
        self._begin()
        if flow.unit.state is not UnitState.UNSHARDED:
            self.free_accessed()
            self.order.unshard(flow.unit)
            flow.unit.hide()
            self._accessed = flow
        flow.unit.sync_requires_grad()
        full = param.unsharded if flow.unit.is_root else param.unsharded.clone()
        return full.to(param.local.dtype)

    def before_update(self) -> None:
        """Leave nothing that was gathered, and nothing on its way from the shards: they are about to change."""
        if any(flow.unit.state is not UnitState.SHARDED for flow in self.flows):
            self._settle()
        for flow in self.flows:
            flow.unit.wait_sent()

    def free_accessed(self) -> None:
        """Free the unit that was gathered for an access, if it is not computing by now."""
        flow, self._accessed = self._accessed, None
        if flow is not None and flow.unit.state is UnitState.UNSHARDED and not flow.unit.is_shown:
            flow.unit.reshard()
            self.order.prefetch()

    def leave(self, needs_backward: bool) -> None:
        """A module that holds units has returned."""
        self.depth -= 1
        if not self.depth:
            if self.root_flow is not None and self.root_flow.unit.is_shown:
                self.root_flow.unit.hide()
            if not needs_backward:
                self._forward_done()

    def enter_with(self, args: Any, kwargs: Any) -> None:
        """A module that holds units is called, if not for a recomputation."""
        if not in_backward():
            self.enter()

    def leave_with(self, args: Any, output: Any) -> None:
        """A module that holds units has returned `output`, if not from a recomputation."""
        if not in_backward():
            self.leave(any(tensor.grad_fn is not None for tensor in tensors_in(output)))

    def pre_forward(self, flow: UnitFlow, args: Any, kwargs: Any) -> None:
        """Gather the unit if it is not there, and watch its inputs for the end of its backward."""
        is_recompute = in_backward()
        if is_recompute:
            self._recompute_starts()
        else:
            self.enter()
            flow.depth += 1
            self._ledger.event("pre_forward", flow.unit.fqn)
        if self._accessed is not None and self._accessed is not flow:
            self.free_accessed()
        if flow.unit.state is not UnitState.UNSHARDED:
            self.order.unshard(flow.unit)
        elif not flow.unit.is_shown:
            flow.unit.show()
        elif not is_recompute:
            flow.unit.sync_requires_grad()
        if flow.unit.is_root or is_recompute or not torch.is_grad_enabled():
            return
        nodes = {t.grad_fn for t in (*tensors_in(args), *tensors_in(kwargs)) if t.grad_fn is not None}
        flow.num_calls += 1
        for node in nodes:
            self._node_hook(node).calls.append(flow)

    def _recompute_starts(self) -> None:
        """Activation checkpointing runs a unit again within backward.

        Re-entrant checkpoints run a backward of their own for each recomputed stretch. The first recomputation belongs
        to the outermost backward, whose end is the one to wait for; at every further one the stretch before is through.
        """
        self._begin()
        self._expect_end_of_backward(creates_graph=False)
        for flow in self.flows:
            if flow.is_reduced and not flow.num_calls and not flow.keep and flow.unit.state is UnitState.UNSHARDED:
                flow.unit.reshard()

    def post_forward(self, flow: UnitFlow, args: Any, output: Any) -> None:
        """Watch the outputs for the start of the unit's backward, and free the unit."""
        if in_backward():  # a recomputation: the backward that asked for it needs the unit at once
            return
        flow.depth -= 1
        self._ledger.event("post_forward", flow.unit.fqn)
        needs_backward = self._watch_outputs(flow, output)
        if not flow.depth and not flow.keep:
            if (flow.keep_between or self.keep_forward) and needs_backward:
                flow.unit.hide()
            else:
                flow.unit.reshard()
            self.order.prefetch()
        self.leave(needs_backward)

    def _watch_outputs(self, flow: UnitFlow, output: Any) -> bool:
        found = needs_backward = False
        for tensor in tensors_in(output):
            found = True
            if not flow.keep and flow.unit.owns_storage_of(tensor):
                flow.keep = True
                self._warn_kept(flow, "returns a view of its parameters")
            if tensor.grad_fn is None:
                continue
            needs_backward = True
            self._watch_output_node(flow, tensor.grad_fn)
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                self._watch_output_node(flow, base.grad_fn)
        if not found and torch.is_grad_enabled() and not flow.keep:
            flow.keep = needs_backward = True
            self._warn_kept(flow, "returns no tensor that could tell when its backward starts")
        return needs_backward

    def _watch_output_node(self, flow: UnitFlow, node: Any) -> None:
        outputs_of = self._node_hook(node).outputs_of
        if flow not in outputs_of:
            outputs_of.append(flow)

    def watch_loss(self, loss: Tensor) -> None:
        """Tie the end of backward to the graph of `loss`, the outermost one."""
        if loss.grad_fn is not None and self.root_flow is not None:
            self._watch_output_node(self.root_flow, loss.grad_fn)

    def _node_hook(self, node: Any) -> _NodeHook:
        hook: _NodeHook | None = node.metadata.get(_NODE_KEY)
        if hook is None or hook.hooks is not self:
            hook = node.metadata[_NODE_KEY] = _NodeHook(self)
            node.register_prehook(hook)
        return hook

    def _warn_kept(self, flow: UnitFlow, reason: str) -> None:
        if flow.unit.fqn not in self._warned:
            self._warned.add(flow.unit.fqn)
            log.warning("%s %s; it stays unsharded until the end of backward.", flow.unit.name, reason)

    # -- backward -----------------------------------------------------------------------------------------------------

    def pre_backward(self, flow: UnitFlow) -> None:
        """Gather the unit for its backward."""
        self._expect_end_of_backward(creates_graph=torch.is_grad_enabled())
        if self._accessed is not None:
            self.free_accessed()
        if not flow.in_backward:
            flow.in_backward = True
            self._ledger.event("pre_backward", flow.unit.fqn)
        if flow.unit.state is not UnitState.UNSHARDED:
            self.order.unshard(flow.unit)

    def _expect_end_of_backward(self, *, creates_graph: bool) -> None:
        if not self._is_end_queued:
            self._is_end_queued = True
            # The backward of a backward reads parameters in places that no hook of ours sees.
            self._creates_graph = creates_graph
            self._backward_starts()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def grad_accumulated(self, flow: UnitFlow, param: Tensor) -> None:
        """One gradient has arrived; with the last one the unit is reduced."""
        self._expect_end_of_backward(creates_graph=torch.is_grad_enabled())
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            grad = param.grad = grad.to_dense()  # shards are dense
        self._ledger.allocate("unsharded_grad", grad.nbytes)
        flow.num_arrived += 1
        if flow.num_arrived >= flow.unit.num_trainable:
            self.post_backward(flow)

    def call_passed(self, flow: UnitFlow) -> None:
        """The backward of one call is through: free the unit, and reduce it if this was the last call."""
        if not flow.in_backward:
            return
        flow.num_passed += 1
        if flow.num_arrived and flow.num_passed >= flow.num_calls:
            self.post_backward(flow)
        is_between = (flow.keep_between or self.keep_forward) and flow.num_passed < flow.num_calls
        is_needed = flow.keep or self.keep_all or is_between
        if flow.unit.state is UnitState.UNSHARDED and not is_needed and not self._creates_graph:
            flow.unit.reshard()

    def grads_of(
        self, outputs: Any, leaves: Sequence[Tensor], params: dict[int, tuple[UnitFlow, UnitParam]], **kwargs: Any
    ) -> list[Tensor | None]:
        """`torch.autograd.grad`, with gradients of parameters averaged over ranks and sharded like these. Collective.

        With `create_graph` they are this rank's own and whole, since a graph does not pass through a reduction.

        Args:
            outputs: as there.
            leaves: what to differentiate, with the unsharded parameters in place of the sharded ones.
            params: by position in `leaves`, the parameters.
            kwargs: as there.
        """
        grads: list[Tensor | None] = list(torch.autograd.grad(outputs, leaves, **kwargs))
        if kwargs.get("create_graph"):
            return grads
        self._begin("gradients")
        before = [param.sharded.grad for _, param in params.values()]
        for position, (_, param) in params.items():
            param.sharded.grad, grad = None, grads[position]
            if grad is not None:
                param.unsharded.grad = grad
                self._ledger.allocate("unsharded_grad", grad.nbytes)
        self._backward_starts()
        with self.order.reducing(True):
            for flow in dict.fromkeys(flow for flow, _ in params.values()):
                self.order.reduce(flow.unit)
            self._end_backward()
        for (position, (_, param)), earlier in zip(params.items(), before, strict=True):
            grads[position], param.sharded.grad = param.sharded.grad, earlier
        return grads

    def post_backward(self, flow: UnitFlow) -> None:
        """Reduce the unit's gradients."""
        flow.num_arrived = 0
        flow.is_reduced = True
        self._ledger.event("post_backward", flow.unit.fqn)
        self.order.reduce(flow.unit)

    def _backward_ended(self) -> None:
        self._is_end_queued = False
        if self._creates_graph:  # the round ends with the backward that runs through this one
            for flow in self.flows:
                flow.keep = True
            self._creates_graph = False
            return
        self._end_backward()

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for hooks in self._bound:
            hooks.remove()

    def reset(self) -> None:
        """After an exception: as if nothing had been called."""
        self.depth = 0
        self.is_step = self._is_end_queued = False
        self._accessed = self.keep_all = None
        for flow in self.flows:
            flow.forget_calls()
