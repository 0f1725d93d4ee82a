"""One pool of rank processes for the whole test session.

`ranks.run(function, world_size, *args)` calls a module-level function on every rank, with `torch.distributed`
initialised (gloo, met through a file), one thread, and the rank as the random seed, and returns the results in rank
order. Ranks are forked once and reused; those of a failed test are replaced, since their group may be dead.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from os import kill
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from tests import layouts
from tests.rank_worker import DUMP_STACKS, Nursery, Task, pack, unpack

MAX_WORLD_SIZE = 4
# Ranks that fail together report within moments; one that waits for a failed rank would wait for the group's timeout.
GRACE_S = 2.0
OUTPUT_LIMIT = 8000  # characters of a rank's output in the report, the last ones

# The frames of a dumped stack that are the same in every test: from the worker's own down to pytest's `main`.
_BELOW_THE_CALL = re.compile(r'^  File ".*rank_worker\.py", line \d+ in _perform\n(?:  File .*\n)*', re.MULTILINE)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Report:
    state: str  # "returned", or what became of the rank instead
    result: Any = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "returned"


@dataclass
class _Worker:
    pid: int
    connection: Connection
    log: Path
    log_start: int = 0  # where the output of the current task begins

    def output(self) -> str:
        with self.log.open(errors="replace") as log:
            log.seek(self.log_start)
            return _BELOW_THE_CALL.sub("", log.read())[-OUTPUT_LIMIT:].strip()


class RankPool:
    """Runs functions on 1 to 4 ranks.

    Args:
        nursery: Forks the workers. The caller closes it.
        directory: For the logs and the meeting points.
        timeout_s: Seconds that a call may take before its ranks are reported as hanging.
    """

    def __init__(self, nursery: Nursery, directory: Path, *, timeout_s: float = 60.0) -> None:
        self._nursery = nursery
        self._directory = directory
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._serial = count()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._discard(self._workers[:])

    def run(self, function: Callable[P, T], world_size: int, /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call `function(*args, **kwargs)` on every rank and return the results in rank order.

        Function, arguments and results are pickled; tensors travel by value.

        Raises:
            AssertionError: A rank raised, died or did not answer. The message has every rank's traceback and output.
        """
        __tracebackhide__ = True
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"Expected a world size of 1 to {MAX_WORLD_SIZE}, got {world_size}.")
        if "<locals>" in function.__qualname__:
            raise ValueError(
                f"Expected a module-level function, got `{function.__qualname__}`: ranks look it up by name."
            )
        workers = self._take(world_size)
        reports: list[_Report] = []
        try:
            reports = self._perform(workers, pack((layouts.call, (layouts.current(), function, *args), kwargs)))
        finally:
            if not reports or not all(report.ok for report in reports):
                self._discard(workers)
        if not all(report.ok for report in reports):
            raise AssertionError(_describe(function.__qualname__, reports))
        return [report.result for report in reports]

    @contextmanager
    def timeout(self, seconds: float) -> Iterator[None]:
        """Give the calls inside the block another timeout."""
        previous, self._timeout_s = self._timeout_s, seconds
        try:
            yield
        finally:
            self._timeout_s = previous

    def _take(self, world_size: int) -> list[_Worker]:
        while len(self._workers) < world_size:
            log = self._directory / f"worker-{next(self._serial)}.log"
            log.touch()
            self._workers.append(_Worker(*self._nursery.fork_worker(log), log))
        return self._workers[:world_size]

    def _discard(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            self._nursery.end_worker(worker.pid)
            worker.connection.close()
            self._workers.remove(worker)

    def _perform(self, workers: Sequence[_Worker], call: bytes) -> list[_Report]:
        store = self._directory / f"store-{next(self._serial)}"
        for rank, worker in enumerate(workers):
            worker.log_start = worker.log.stat().st_size
            worker.connection.send(Task(rank, len(workers), store, call))
        reports = self._collect(workers)
        if all(report.ok for report in reports):
            for worker in workers:
                worker.connection.send_bytes(b"clean up")
            cleaned = self._collect(workers)
            reports = [report if clean.ok else clean for report, clean in zip(reports, cleaned, strict=True)]
        store.unlink(missing_ok=True)
        return reports

    def _collect(self, workers: Sequence[_Worker]) -> list[_Report]:
        """One report per rank, waiting until the timeout, or until shortly after the first failure."""
        reports: dict[int, _Report] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        start = time.monotonic()
        deadline = start + self._timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [waiting.pop(connection) for connection in tuple(waiting) if connection in ready]:
                reports[rank] = self._receive(workers[rank])
                if not reports[rank].ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        hanging = [workers[rank] for rank in waiting.values()]
        _dump_stacks(hanging)
        for rank in waiting.values():
            state = f"still running after {time.monotonic() - start:.0f} s"
            reports[rank] = _Report(state, detail=workers[rank].output())
        return [reports[rank] for rank in range(len(workers))]

    def _receive(self, worker: _Worker) -> _Report:
        try:
            state, result = unpack(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return _Report(f"died, {self._nursery.end_worker(worker.pid)}", detail=worker.output())
        if state == "returned":
            return _Report(state, result, worker.output())
        return _Report(state, detail=f"{result}\n{worker.output()}".strip())


def _dump_stacks(workers: Sequence[_Worker]) -> None:
    """Let the workers write their stacks into their logs, and wait until they have, or for a second at most."""
    sizes = [worker.log.stat().st_size for worker in workers]
    for worker in workers:
        kill(worker.pid, DUMP_STACKS)
    for _ in range(20):
        if all(worker.log.stat().st_size > size for worker, size in zip(workers, sizes, strict=True)):
            break
        time.sleep(0.05)


def _describe(name: str, reports: Sequence[_Report]) -> str:
    failed = sum(not report.ok for report in reports)
    lines = [f"`{name}` failed on {failed} of {len(reports)} ranks."]
    for rank, report in enumerate(reports):
        lines += ["", f"--- rank {rank}: {report.state}", report.detail or "(no output)"]
    return "\n".join(lines)
