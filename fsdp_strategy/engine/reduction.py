"""From unsharded gradients to sharded ones: sum over ranks in `reduce_dtype`, divide by N, add to what is there.

One reduction is in flight at a time: while it is, the gradients of the next unit grow, and no more memory is held.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fsdp_strategy.engine.layout import plan_reduction
from fsdp_strategy.engine.mesh import ShardMesh
from fsdp_strategy.engine.operations import Pending, ReduceOp
from fsdp_strategy.engine.recorder import Ledger
from fsdp_strategy.engine.sharded_tensor import ShardedTensor, local_of
from fsdp_strategy.engine.unit import Span, Unit, UnitParam

ReduceWire = Literal["reduce_dtype", "param_dtype"]

# Of a view in the list of views, seen by `sys.getrefcount` from a loop over it: list, loop variable, argument.
_OWN_REFERENCES = 3


@dataclass(slots=True)
class _SpanGrads:
    """The sharded gradients of a span's trainable parameters."""

    trainable: tuple[bool, ...]  # of the span's parameters, when this was built
    params: list[UnitParam]
    op: ReduceOp
    buffer: Tensor  # (shard_numel,) the parameters' own dtype
    views: list[ShardedTensor]  # per trainable parameter, over `buffer`

    def shard_in(self, flat: Tensor, position: int) -> Tensor:
        """This rank's shard of one trainable parameter as a view of a (shard_numel,) buffer."""
        return self.op.layout.shard_view(flat, position)


@dataclass(slots=True)
class _InFlight:
    unit: Unit
    parts: list[tuple[_SpanGrads, Pending]]
    grad_nbytes: int
    buffer_nbytes: int


class Reducer:
    """Starts and finishes the reductions of units, and owns the buffers of sharded gradients."""

    def __init__(
        self, mesh: ShardMesh, ledger: Ledger, *, reduce_dtype: torch.dtype | None = None,
        reduce_wire: ReduceWire = "reduce_dtype",
    ) -> None:  # fmt: skip
        """Reduce over `mesh`.

        Args:
            mesh: whose shard axis is reduced over.
            ledger: told of the bytes.
            reduce_dtype: of the sum; None for float32, or the parameter's own dtype where that is wider.
            reduce_wire: in which dtype gradients travel.
        """
        self._mesh, self._ledger, self._reduce_dtype, self._wire = mesh, ledger, reduce_dtype, reduce_wire
        self._plans: dict[Span, _SpanGrads] = {}
        self._in_flight: _InFlight | None = None
        self.has_grad: set[UnitParam] = set()  # got a gradient on this rank in this backward
        self._was_none: set[UnitParam] = set()  # had no sharded gradient before this backward
        # Whether this rank is in its backward. Until then the user may still zero the gradients of the last step, so
        # what other ranks reduce meanwhile is held back.
        self.in_backward = False
        self._held: list[tuple[_SpanGrads, Tensor]] = []
        self._accumulated: dict[UnitParam, Tensor] = {}  # whole gradients of earlier micro-batches, in `reduce_dtype`

    def reduce_dtype(self, span: Span) -> torch.dtype:
        """The dtype in which the gradients of the span are summed."""
        return self._reduce_dtype or torch.promote_types(span.shard.dtype, torch.float32)

    def _wire_dtype(self, span: Span) -> torch.dtype:
        """The dtype in which gradients travel: that of the sum, or of the parameter if it is narrower."""
        reduce_dtype = self.reduce_dtype(span)
        is_narrower = span.param_dtype.itemsize < reduce_dtype.itemsize
        return span.param_dtype if self._wire == "param_dtype" and is_narrower else reduce_dtype

    def _plan(self, span: Span) -> _SpanGrads | None:
        trainable = tuple(param.sharded.requires_grad for param in span.params)
        plan = self._plans.get(span)
        if plan is not None and plan.trainable == trainable:
            return plan
        params = [param for param, yes in zip(span.params, trainable, strict=True) if yes]
        if not params:
            return None
        with torch.inference_mode(False), torch.no_grad():
            self._plans[span] = self._build(span, trainable, params)
        return self._plans[span]

    def _build(self, span: Span, trainable: tuple[bool, ...], params: list[UnitParam]) -> _SpanGrads:
        mesh = self._mesh
        layout = plan_reduction(span.layout, trainable, span.param_dtype.itemsize, mesh.collectives.policy)
        old = self._plans.get(span)
        if old is not None:
            self._ledger.free("sharded_grad", old.buffer.nbytes)
        buffer = torch.zeros(layout.shard_numel, dtype=span.shard.dtype, device=mesh.device)
        self._ledger.allocate("sharded_grad", buffer.nbytes)
        op = mesh.collectives.bind_reduce(
            layout, reduce_dtype=self.reduce_dtype(span), wire_dtype=self._wire_dtype(span)
        )
        plan = _SpanGrads(trainable, params, op, buffer, [])
        plan.views += [mesh.show(param.cut, plan.shard_in(buffer, i)) for i, param in enumerate(params)]
        return plan

    def accumulate(self, unit: Unit) -> None:
        """Add the gradients that `unit` has to those of earlier micro-batches, on this rank alone."""
        with torch.no_grad():
            for span in unit.spans:
                for param in span.params:
                    if param.unsharded.grad is not None:
                        grad = self._take(param)
                        assert grad is not None
                        self._accumulated[param] = self._in_dtype(grad, self.reduce_dtype(span))

    def _take(self, param: UnitParam) -> Tensor | None:
        """All of the parameter's gradient on this rank, out of where it lies."""
        grad, earlier = param.unsharded.grad, self._accumulated.pop(param, None)
        param.unsharded.grad = None
        if earlier is None or grad is None:
            return grad if earlier is None else earlier
        self._ledger.free("unsharded_grad", grad.nbytes)
        return earlier.add_(grad)

    def _in_dtype(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        taken = grad.to(dtype.to_complex() if grad.is_complex() else dtype)
        if taken is not grad:
            self._ledger.allocate("unsharded_grad", taken.nbytes)
            self._ledger.free("unsharded_grad", grad.nbytes)
        return taken

    def has_grads_of(self, unit: Unit) -> bool:
        """Whether this rank has gradients of the unit that are not reduced."""
        return any(param.unsharded.grad is not None or param in self._accumulated for param in unit.params)

    @property
    def has_accumulated(self) -> bool:
        """Whether gradients of earlier micro-batches wait for their reduction."""
        return bool(self._accumulated)

    def start(self, unit: Unit) -> None:
        """Enqueue the reduction of the gradients that `unit` has on this rank; missing ones count as zero.

        Finishes the reduction before it. The gradients' memory is held until this one is finished.
        """
        self.finish()
        flight = _InFlight(unit, [], 0, 0)
        sent_numel = sent_nbytes = num_messages = 0
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for span in unit.spans:
                plan = self._plan(span)
                if plan is None:
                    continue
                for param in span.params:
                    if not param.sharded.requires_grad:
                        self._drop(unit, param)  # it was frozen after it was unsharded
                grads = [self._take(param) for param in plan.params]
                for param, grad in zip(plan.params, grads, strict=True):
                    if grad is not None:
                        self.has_grad.add(param)
                        flight.grad_nbytes += grad.nbytes
                op = plan.op
                pending = op.start(grads, self._place_of(plan))
                flight.parts.append((plan, pending))
                flight.buffer_nbytes += pending.buffer_nbytes
                sent_numel += op.sent_numel
                sent_nbytes += op.sent_numel * op.wire_dtype.itemsize
                num_messages += op.num_messages
        self._ledger.allocate("reduce_buffer", flight.buffer_nbytes)
        self._in_flight = flight
        self._ledger.event(
            "reduce_scatter", unit.fqn, sent_numel=sent_numel, sent_nbytes=sent_nbytes, num_messages=num_messages
        )

    def _drop(self, unit: Unit, param: UnitParam) -> None:
        unit.drop_grad(param)
        earlier = self._accumulated.pop(param, None)
        if earlier is not None:
            self._ledger.free("unsharded_grad", earlier.nbytes)

    def finish(self) -> None:
        """Wait for the reduction in flight, if any, and add its result to the sharded gradients."""
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for plan, pending in flight.parts:
                mean = pending.wait()
                assert mean is not None
                if self.in_backward:
                    self._accumulate(plan, mean)
                else:
                    self._held.append((plan, mean))
                pending.wait_sent()
        self._ledger.free("reduce_buffer", flight.buffer_nbytes)
        self._ledger.free("unsharded_grad", flight.grad_nbytes)
        self._ledger.event("wait_reduce_scatter", flight.unit.fqn)

    def _place_of(self, plan: _SpanGrads) -> Tensor | None:
        """The buffer of sharded gradients itself, if nothing is in it that anybody may still want."""
        if not self.in_backward or plan.buffer.dtype != plan.op.reduce_dtype:
            return None
        if any(param.sharded.grad is not None for param in plan.params):
            return None
        self._renew_if_kept(plan)
        return plan.buffer

    def _renew_if_kept(self, plan: _SpanGrads) -> None:
        if any(sys.getrefcount(view) > _OWN_REFERENCES for view in plan.views):
            self._renew_buffer(plan)  # the user has kept a gradient of an earlier step

    def _accumulate(self, plan: _SpanGrads, mean: Tensor) -> None:
        present = [param.sharded.grad for param in plan.params]
        if all(grad is view for grad, view in zip(present, plan.views, strict=True)):
            plan.buffer.add_(mean)
            return
        is_in_place = mean is plan.buffer
        if not is_in_place and all(grad is None for grad in present):
            self._renew_if_kept(plan)
            plan.buffer.copy_(mean)
            is_in_place = True
        for position, (param, grad, view) in enumerate(zip(plan.params, present, plan.views, strict=True)):
            if grad is None:
                self._was_none.add(param)
                if not is_in_place:
                    view._local_tensor.copy_(plan.shard_in(mean, position))
                param.sharded.grad = view
            else:  # a gradient that the user put there, or kept from an earlier backward
                local_of(grad).add_(plan.shard_in(mean, position))

    def _renew_buffer(self, plan: _SpanGrads) -> None:
        with torch.inference_mode(False):
            plan.buffer = torch.zeros_like(plan.buffer)
            plan.views = [self._mesh.show(p.cut, plan.shard_in(plan.buffer, i)) for i, p in enumerate(plan.params)]

    def settle(self, has_grad_anywhere: set[UnitParam]) -> None:
        """All ranks are through: gradients are final, and None for parameters that got none on any rank."""
        self.finish()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for plan, mean in self._held:
                self._accumulate(plan, mean)
        self._held.clear()
        for param in self._was_none:
            if param not in has_grad_anywhere:
                param.sharded.grad = None
        self._was_none.clear()
        self.has_grad.clear()
        self._run_hooks(has_grad_anywhere)

    def _run_hooks(self, params: set[UnitParam]) -> None:
        """The user's hooks on accumulated gradients, when gradients are final, on every rank in the same order."""
        for param in sorted(params, key=lambda param: param.fqn):
            hooks = getattr(param.sharded, "_post_accumulate_grad_hooks", None)
            for hook in list((hooks or {}).values()):
                hook(param.sharded)

    def abandon(self) -> None:
        """After an exception: the results of this backward no longer matter; `drain` waits for what is in flight."""
        self._held.clear()
        self._was_none.clear()
        self.has_grad.clear()
        self._ledger.free("unsharded_grad", sum(grad.nbytes for grad in self._accumulated.values()))
        self._accumulated.clear()
        self.in_backward = False

    def drain(self) -> None:
        """Wait for a reduction that was in flight when the iteration was abandoned, and drop it."""
        self.finish()
        self._held.clear()
