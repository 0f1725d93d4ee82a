"""Calls that take turns, so that whatever else the machine does hits all of them."""

import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]
Samples = dict[str, list[float]]  # ms, by name


def nothing() -> None:
    """Between calls on a device that the host does not have to wait for."""


def race(
    calls: Mapping[str, Call],
    *,
    num_rounds: int,
    num_calls: int,
    clock: Callable[[], float] = time.thread_time,
    settle: Call = nothing,
    is_timed_to_the_end: bool = False,
) -> Samples:
    """Every call in turn, round after round; each round begins with another one.

    Args:
        calls: what races. Each turn begins with an untimed call, for what the turn before has pushed out of the caches.
        num_rounds: turns of each.
        num_calls: timed calls of a turn.
        clock: seconds; the default is the CPU time of the calling thread.
        settle: waits for the device, before each call.
        is_timed_to_the_end: also at the end of each call, within its time.
    """
    names = list(calls)
    samples: Samples = {name: [] for name in calls}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            calls[name]()
            for _ in range(num_calls):
                settle()
                start = clock()
                calls[name]()
                if is_timed_to_the_end:
                    settle()
                samples[name].append(1e3 * (clock() - start))
    return samples
