"""The order of collectives in one iteration, as all ranks have agreed on it: pure data and arithmetic.

An iteration (a training step, a validation step) is a sequence of rounds. A round is a forward and, in training, its
backward; it ends where all ranks meet. Gathers and reductions stand in one order: a rank that waits for one of them has
started all those before it, so whichever rank is furthest behind can always go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Op(NamedTuple):
    """One collective of a round."""

    is_reduction: bool
    unit: int  # index of the unit


@dataclass(frozen=True, slots=True)
class Round:
    """The collectives of a round, in the order in which every rank starts them (prefetched gathers excepted)."""

    ops: tuple[Op, ...] = ()

    def find_gather(self, unit: int, cursor: int) -> int | None:
        """The first place at or after `cursor` at which `unit` is gathered, or None."""
        for place in range(cursor, len(self.ops)):
            if self.ops[place] == (False, unit):
                return place
        return None

    def next_to_unshard(self, cursor: int, limit: int) -> list[int]:
        """Places to gather ahead when everything before `cursor` is done: the next `limit` gathers."""
        places: list[int] = []
        for place in range(cursor, len(self.ops)):
            if len(places) == limit:
                break
            if not self.ops[place].is_reduction:
                places.append(place)
        return places


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one kind of iteration does, recorded when it ran for the first time."""

    rounds: tuple[Round, ...]

    def round(self, index: int) -> Round | None:
        """The round at `index`, None after the last."""
        return self.rounds[index] if index < len(self.rounds) else None


@dataclass(slots=True)
class ScheduleRecording:
    """Collects a `Schedule` while an iteration runs without one."""

    rounds: list[Round] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def end_round(self) -> None:
        """Close the round that is being collected."""
        self.rounds.append(Round(tuple(self.ops)))
        self.ops.clear()
