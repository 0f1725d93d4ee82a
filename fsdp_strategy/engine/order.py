"""One order of collectives on all ranks, whatever each rank computes.

[Note: following and negotiating] The first iteration of a kind is negotiated: before every collective the ranks tell
each other which one they need next, the highest request is carried out by all (who did not ask for it gathers and
frees, or reduces zeros), and so on until everyone is through. What was carried out is the schedule. Later iterations
follow it without asking, and prefetch. A rank that skips a unit takes part in its collectives all the same. A rank that
needs something the schedule does not hold plays the rest of the round and waits where the round ends: there all ranks
negotiate again, until all are done. After such a round the schedule is dropped and recorded anew.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fsdp_strategy.engine.collectives import Collectives
from fsdp_strategy.engine.recorder import Ledger
from fsdp_strategy.engine.reduction import Reducer
from fsdp_strategy.engine.schedule import Op, Round, Schedule, ScheduleRecording
from fsdp_strategy.engine.unit import Unit, UnitParam, UnitState

log = logging.getLogger(__name__)

# Requests, ranked: the highest is served first. Gathers and reductions of unit u follow.
_IDLE, _BEGIN, _DONE = 0, 1, 2
_FIRST_OP = 3

# After so many iterations of a kind that left their schedule, the kind is negotiated for good.
_MAX_DROPS = 8


def _gather_request(unit: Unit) -> int:
    return _FIRST_OP + 2 * unit.index


def _reduce_request(unit: Unit) -> int:
    return _FIRST_OP + 2 * unit.index + 1


class CollectiveOrder:
    """Decides when a gather or reduction is started; the engine tells it what this rank needs."""

    def __init__(
        self, units: Sequence[Unit], reducer: Reducer, collectives: Collectives, ledger: Ledger, *, prefetch_limit: int
    ) -> None:
        self._units, self._reducer, self._collectives, self._ledger = units, reducer, collectives, ledger
        self._prefetch_limit = prefetch_limit
        self._params: list[UnitParam] = [param for unit in units for param in unit.params]
        self._schedules: dict[str, Schedule] = {}
        self._num_drops: dict[str, int] = {}
        self._is_abandoned = False
        self.reduces = True  # False while gradients of micro-batches are accumulated unsharded
        self._reset_iteration()

    # -- iterations ---------------------------------------------------------------------------------------------------

    def _reset_iteration(self, kind: str = "") -> None:
        self._kind = kind
        self._schedule: Schedule | None = self._schedules.get(kind)
        self._recording = ScheduleRecording()
        self._round_index = 0
        self._deviated = self._any_deviated = self._any_idle = False
        self._enter_round()

    def _enter_round(self) -> None:
        self._round: Round | None = self._schedule.round(self._round_index) if self._schedule else None
        self._cursor = 0  # the first collective of the round that this rank has not done
        self._issued = 0  # gathers before this place have been started
        self._ready: list[Unit] = []
        self._is_open = False  # whether this rank needed anything in the round

    def begin(self, kind: str) -> None:
        """Start an iteration; iterations of one kind share a schedule. Meets all ranks."""
        if self._is_abandoned:
            self._drain()
        self._reset_iteration(kind)
        self._negotiate(_BEGIN)

    def end(self) -> None:
        """End the iteration: take part in what other ranks still do in it, then settle its schedule."""
        self._is_open |= self.reduces and self._reducer.has_accumulated
        while self._is_open or self._round is not None:
            self.close_round()
        if self._any_deviated:
            self._num_drops[self._kind] = self._num_drops.get(self._kind, 0) + 1
            self._schedules.pop(self._kind, None)
            if self._num_drops[self._kind] == _MAX_DROPS and self._collectives.shard_rank == 0:
                log.warning(
                    "The order of units in %s steps keeps changing; they run without prefetch from now on.", self._kind
                )
        elif self._schedule is None and not self._any_idle and self._num_drops.get(self._kind, 0) < _MAX_DROPS:
            self._schedules[self._kind] = Schedule(tuple(self._recording.rounds))

    def join_while_others_run(self, kind: str) -> None:
        """This rank has no more iterations of the kind: take part in those of the others until none has any."""
        self._kind = kind
        while self._negotiate(_IDLE) != _IDLE:
            self._reset_iteration(kind)
            self._is_open = self._any_idle = True
            self.end()

    # -- what this rank needs -----------------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Make `unit`, which is not unsharded, readable, and start the gathers of the next ones."""
        self._is_open = True
        if self._round is not None:
            place = self._round.find_gather(unit.index, self._cursor)
            if place is not None:
                self._skip_to(place)
                self._issue_through(place)
                unit.wait_for_unshard()
                self._cursor = place + 1
                self._start_ready_reductions()
                self.prefetch()
                return
            self._leave_schedule()
        self._negotiate(_gather_request(unit))

    @contextmanager
    def reducing(self, value: bool) -> Iterator[None]:
        """Inside the block gradients are reduced, or accumulated unsharded."""
        before, self.reduces = self.reduces, value
        try:
            yield
        finally:
            self.reduces = before

    def prefetch(self) -> None:
        """Start the gathers of the next units in the schedule, as far as the limit and free storages allow."""
        if self._round is None:
            return
        for place in self._round.next_to_unshard(self._cursor, self._prefetch_limit):
            if place < self._issued:
                continue
            if self._units[self._round.ops[place].unit].state is not UnitState.SHARDED:
                break
            self._issue_through(place)

    def reduce(self, unit: Unit) -> None:
        """`unit` has its gradients: reduce them now, or as soon as the collectives before it have been started."""
        self._is_open = True
        if not self.reduces:
            self._reducer.accumulate(unit)
            return
        if self._round is None:
            self._negotiate(_reduce_request(unit))
            return
        self._ready.append(unit)
        self._start_ready_reductions()

    def _start_ready_reductions(self) -> None:
        assert self._round is not None
        while self._ready and self._cursor < len(self._round.ops):
            op = self._round.ops[self._cursor]
            unit = self._units[op.unit]
            if not op.is_reduction or unit not in self._ready:
                return
            self._ready.remove(unit)
            self._reducer.start(unit)
            self._cursor += 1

    def close_round(self) -> None:
        """End of a backward, or of an iteration without one: finish what any rank still needs. Meets all ranks."""
        if self._round is not None:
            self._skip_to(len(self._round.ops))
        for unit in self._units:
            if not self.reduces:
                self._reducer.accumulate(unit)
            elif self._reducer.has_grads_of(unit):
                self._deviated |= self._schedule is not None
                self._negotiate(_reduce_request(unit))
        self._reducer.finish()
        self._negotiate(_DONE)
        for unit in self._units:
            unit.wait_sent()
        if self._schedule is None:
            self._recording.end_round()
        self._round_index += 1
        self._enter_round()

    def abandon(self) -> None:
        """After an exception: forget the iteration, without meeting anybody."""
        self._reducer.abandon()
        for unit in self._units:
            unit.abandon()
        self._reset_iteration()
        self._is_abandoned = True

    def _drain(self) -> None:
        """Wait for what was in flight when an iteration was abandoned: memory that is still written is not reused."""
        self._reducer.drain()
        for unit in self._units:
            unit.drain()
        self._is_abandoned = False

    # -- following ----------------------------------------------------------------------------------------------------

    def _issue_through(self, place: int) -> None:
        """Start all gathers up to `place` that have not been started ahead."""
        assert self._round is not None
        for op in self._round.ops[self._issued : place + 1]:
            if op.is_reduction:
                continue
            unit = self._units[op.unit]
            if unit.state is UnitState.SHARDED:
                unit.unshard()
            else:
                unit.regather()
        self._issued = max(self._issued, place + 1)

    def _skip_to(self, place: int) -> None:
        """Take part in the collectives before `place` that this rank does not need, and free what they bring."""
        assert self._round is not None
        while self._cursor < place:
            op = self._round.ops[self._cursor]
            unit = self._units[op.unit]
            if op.is_reduction:
                self._reducer.start(unit)
                if unit in self._ready:
                    self._ready.remove(unit)
            else:
                self._issue_through(self._cursor)
                if unit.state is UnitState.GATHERING:
                    unit.wait_for_unshard()
                    unit.reshard()
            self._cursor += 1

    def _leave_schedule(self) -> None:
        assert self._round is not None
        self._skip_to(len(self._round.ops))
        self._round = None
        self._deviated = True

    # -- negotiating --------------------------------------------------------------------------------------------------

    def _negotiate(self, request: int) -> int:
        """Carry out what the ranks ask for, highest first, until `request` is the highest; return the last highest.

        An idle rank returns as soon as another begins an iteration.
        """
        while True:
            flags = [param in self._reducer.has_grad for param in self._params]
            kind = zlib.crc32(self._kind.encode()) >> 1
            facts = [request, self._deviated, request == _IDLE, kind, -kind]
            highest = self._collectives.agree_max(torch.tensor([*facts, *flags], dtype=torch.int32))
            self._ledger.event("agree", "")
            if highest[3] != -highest[4]:
                self._raise_different_kinds()
            code = int(highest[0])
            self._any_deviated |= bool(highest[1])
            self._any_idle |= bool(highest[2])
            if code >= _FIRST_OP:
                self._serve(code, mine=code == request)
            elif code == _DONE and request == _DONE:
                anywhere = {
                    param for param, flag in zip(self._params, highest[len(facts) :].tolist(), strict=True) if flag
                }
                self._reducer.settle(anywhere)
            if code == request or (request == _IDLE and code == _BEGIN):
                return code

    def _raise_different_kinds(self) -> None:
        kinds = self._collectives.exchange_objects(self._kind)
        self._is_abandoned = True
        listed = ", ".join(f"{kind!r} on rank {rank}" for rank, kind in enumerate(kinds))
        raise RuntimeError(
            f"[rank {self._collectives.shard_rank}] Expected the same kind of step on every rank, got {listed}. "
            "Give every rank as many batches as the others, and run the same loops on all of them."
        )

    def _serve(self, code: int, *, mine: bool) -> None:
        index, is_reduce = divmod(code - _FIRST_OP, 2)
        unit = self._units[index]
        self._recording.ops.append(Op(bool(is_reduce), index))
        if is_reduce:
            self._reducer.start(unit)
            return
        if unit.state is not UnitState.SHARDED:
            unit.regather()
            return
        unit.unshard()
        unit.wait_for_unshard()
        if not mine:
            unit.reshard()
