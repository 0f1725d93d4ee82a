"""The forked side of the rank pool: a nursery process that forks, and the workers, which run one task at a time.

Workers are not forked from pytest itself. Once a test has run a backward pass there, autograd refuses to work in
forked children, and any thread pool the tests have started is dead in them. The nursery is forked when collection
ends: torch and the test modules are imported, pytest's warning filters are set, and nothing has run yet.
"""

import contextlib
import faulthandler
import gc
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

DUMP_STACKS = signal.SIGUSR1
GROUP_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Task:
    """One rank's part of a test."""

    rank: int
    world_size: int
    store: Path  # the file that the ranks meet at
    call: bytes  # packed (function, args, kwargs), the same for all ranks


def pack(value: object) -> bytes:
    """Pickle bytes that hold the tensors' data too, so that no shared-memory file outlives the sender."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


class Nursery:
    """Pytest's handle on the nursery process."""

    def __init__(self) -> None:
        self._control, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._control.close()
            _run_nursery(theirs)
        theirs.close()

    def fork_worker(self, log: Path) -> tuple[int, Connection]:
        """Fork a worker that writes its output to `log`. Returns its process id and the connection to it."""
        ours, theirs = Pipe()
        self._control.send(("fork", log))
        send_handle(self._control, theirs.fileno(), self._pid)
        theirs.close()
        return self._control.recv(), ours

    def end_worker(self, pid: int) -> str:
        """Kill the worker and what it started. Returns how it ended, which is its own doing if it was dead already."""
        self._control.send(("end", pid))
        return _describe_exit(self._control.recv())

    def close(self) -> None:
        """End the nursery, which kills the workers that are left."""
        self._control.close()
        os.waitpid(self._pid, 0)


def _describe_exit(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def _run_nursery(control: Connection) -> NoReturn:
    workers: set[int] = set()
    try:
        os.setsid()  # Ctrl-C is for pytest, which then ends the ranks in order
        gc.freeze()  # collections in the workers leave the shared pages alone
        with contextlib.suppress(EOFError):  # pytest is gone
            while True:
                order, argument = control.recv()
                control.send(_fork_worker(control, argument, workers) if order == "fork" else _end(argument, workers))
    except BaseException:  # noqa: BLE001 - a forked process must not go on as a second pytest
        traceback.print_exc()
    finally:
        for pid in tuple(workers):
            _end(pid, workers)
        os._exit(0)


def _fork_worker(control: Connection, log: Path, workers: set[int]) -> int:
    handle = recv_handle(control)
    pid = os.fork()
    if pid == 0:
        control.close()
        _run_worker(Connection(handle), log)
    os.close(handle)
    os.setpgid(pid, pid)  # so that it can be killed together with the processes it starts
    workers.add(pid)
    return pid


def _end(pid: int, workers: set[int]) -> int:
    if pid not in workers:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    workers.discard(pid)
    return os.waitpid(pid, 0)[1]


def _run_worker(connection: Connection, log: Path) -> NoReturn:
    try:
        _redirect_output(log)
        torch.set_num_threads(1)
        with contextlib.suppress(EOFError):  # the pool is closed
            while True:
                _serve(connection)
    except BaseException:  # noqa: BLE001 - a forked process must not go on as a second pytest
        traceback.print_exc()
    finally:
        os._exit(0)


def _redirect_output(log: Path) -> None:
    """Send everything to the log: both descriptors, Python's streams, and the loggers, which hold pytest's streams."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(descriptor, "w", buffering=1, errors="replace")  # noqa: SIM115 - open for life
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    faulthandler.enable(sys.stderr)
    faulthandler.register(DUMP_STACKS, sys.stderr, all_threads=True)


def _serve(connection: Connection) -> None:
    task: Task = connection.recv()
    environment = dict(os.environ)
    connection.send_bytes(_perform(task))
    # The pool answers when every rank has reported: a group that is torn down earlier takes the others with it.
    connection.recv_bytes()
    connection.send_bytes(_clean_up(environment))


def _perform(task: Task) -> bytes:
    try:
        # Ranks that started from one seed would hide a broadcast that is missing.
        torch.manual_seed(task.rank)
        function, args, kwargs = unpack(task.call)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{task.store}",
            rank=task.rank,
            world_size=task.world_size,
            timeout=GROUP_TIMEOUT,
        )
        return pack(("returned", function(*args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - `pytest.fail` and `sys.exit` too are the rank's answer
        return pack(("raised", _format(error)))


def _clean_up(environment: Mapping[str, str]) -> bytes:
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # engines are cycles, and each holds groups whose threads live as long
        os.environ.clear()
        os.environ.update(environment)
        return pack(("returned", None))
    except BaseException as error:  # noqa: BLE001 - reported as the rank's failure
        return pack(("raised", _format(error)))


def _format(error: BaseException) -> str:
    own_frame = error.__traceback__
    below = own_frame.tb_next if own_frame is not None else None
    return "".join(traceback.format_exception(type(error), error, below or own_frame))
