"""What the engine did, in order, and how many bytes it holds: counts, traces and memory figures come from here.

An engine without a recorder pays one `is None` check per event. `Recorder` objects are made by `engine.record()`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CATEGORIES = (
    "sharded_param", "unsharded_param", "sharded_grad", "unsharded_grad", "gather_buffer", "reduce_buffer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the engine did.

    Attributes:
        kind: `all_gather`, `wait_all_gather`, `reduce_scatter`, `wait_reduce_scatter`, `reshard`, `agree`, or one of
            the hooks `pre_forward`, `post_forward`, `pre_backward`, `post_backward`.
        unit: fqn of the unit; "" is the root unit, or no unit for `agree`.
        sent_numel: elements that this rank sends to other ranks.
        sent_nbytes: the same in bytes.
        num_messages: point-to-point sends or native collectives issued.
        time_ns: `time.perf_counter_ns()` at the event.
        live_nbytes: bytes per category after the event.
    """

    kind: str
    unit: str
    sent_numel: int
    sent_nbytes: int
    num_messages: int
    time_ns: int
    live_nbytes: dict[str, int]


class Ledger:
    """Bytes that the engine has allocated, by category. Always kept: an addition per buffer, not per parameter."""

    def __init__(self) -> None:
        self.live_nbytes: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.recorder: Recorder | None = None

    def allocate(self, category: str, nbytes: int) -> None:
        """`nbytes` more are held in the category."""
        self.live_nbytes[category] += nbytes
        if self.recorder is not None:
            self.recorder.observe(self.live_nbytes)

    def free(self, category: str, nbytes: int) -> None:
        """`nbytes` fewer are held in the category."""
        self.live_nbytes[category] -= nbytes
        assert self.live_nbytes[category] >= 0, f"{category} freed twice"

    def event(self, kind: str, unit: str, *, sent_numel: int = 0, sent_nbytes: int = 0, num_messages: int = 0) -> None:
        """Note an event; costs a call and a check when nothing records."""
        if self.recorder is not None:
            self.recorder.events.append(
                Event(kind, unit, sent_numel, sent_nbytes, num_messages, time.perf_counter_ns(), dict(self.live_nbytes))
            )

    @contextmanager
    def record(self) -> Iterator[Recorder]:
        """Record until the block ends. Recorders do not nest."""
        if self.recorder is not None:
            raise RuntimeError("Expected no active recorder, got one that is still recording. Leave its block first.")
        self.recorder = Recorder(self.live_nbytes)
        try:
            yield self.recorder
        finally:
            self.recorder = None


class Recorder:
    """Events and peak bytes of one recorded stretch."""

    def __init__(self, live_nbytes: dict[str, int]) -> None:
        self.events: list[Event] = []
        self.peak_nbytes: dict[str, int] = dict(live_nbytes)
        self.peak_total_nbytes: int = sum(live_nbytes.values())

    def observe(self, live_nbytes: dict[str, int]) -> None:
        """Keep the highest figure of each category and of their sum."""
        for category, nbytes in live_nbytes.items():
            self.peak_nbytes[category] = max(self.peak_nbytes[category], nbytes)
        self.peak_total_nbytes = max(self.peak_total_nbytes, sum(live_nbytes.values()))

    def of_kind(self, *kinds: str) -> list[Event]:
        """Events of the given kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    def count(self, kind: str) -> int:
        """Number of events of the kind."""
        return len(self.of_kind(kind))

    def counts(self) -> Counter[str]:
        """Number of events of every kind."""
        return Counter(event.kind for event in self.events)

    def sent_numel(self, kind: str) -> int:
        """Elements that this rank sent in collectives of the kind."""
        return sum(event.sent_numel for event in self.of_kind(kind))

    def sent_nbytes(self, kind: str) -> int:
        """Bytes that this rank sent in collectives of the kind."""
        return sum(event.sent_nbytes for event in self.of_kind(kind))
