"""The order of units in one iteration, as all ranks have agreed on it: pure data and arithmetic.

An iteration (a training step, a validation step) is a sequence of rounds. A round is a forward and, in training, its
backward; it ends where all ranks meet. Within a round gathers keep one order and reductions another: they travel in
separate groups, so the two orders need no order between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Round:
    """Unit indices in the order in which every rank starts their collectives."""

    gathers: tuple[int, ...] = ()
    reductions: tuple[int, ...] = ()


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
    gathers: list[int] = field(default_factory=list)
    reductions: list[int] = field(default_factory=list)

    def end_round(self) -> None:
        """Close the round that is being collected."""
        self.rounds.append(Round(tuple(self.gathers), tuple(self.reductions)))
        self.gathers.clear()
        self.reductions.clear()


def find_gather(gathers: Sequence[int], unit: int, position: int) -> int | None:
    """The first place at or after `position` at which `unit` is gathered, or None."""
    for place in range(position, len(gathers)):
        if gathers[place] == unit:
            return place
    return None


def next_to_unshard(gathers: Sequence[int], position: int, limit: int) -> range:
    """Places to gather ahead when everything before `position` has been used: the next `limit`."""
    return range(position, min(position + limit, len(gathers)))
