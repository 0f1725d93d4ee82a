"""Rank processes for benchmarks: forked from a process that has imported everything, and joined in a gloo group."""

import logging
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

# Before torch is imported: ranks are forked, and a thread pool does not survive a fork. Also, each rank has one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_P = ParamSpec("_P")
_R = TypeVar("_R")


def run_on_ranks(num_ranks: int, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> list[_R]:
    """What `function` returns on each of `num_ranks` fresh processes, in rank order. An exception on any is raised."""
    torch.set_num_threads(1)  # here too, so that no thread pool is made that the ranks would inherit
    with tempfile.TemporaryDirectory() as folder:
        job = (num_ranks, Path(folder), function, args, kwargs)
        mp.start_processes(_run_rank, args=job, nprocs=num_ranks, start_method="fork")
        return [pickle.loads(_result_file(Path(folder), rank).read_bytes()) for rank in range(num_ranks)]


def run_alone(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """What `function` returns in a fresh process without a process group. An exception there is raised."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run_one, args=(Path(folder), function, args, kwargs), nprocs=1, start_method="fork")
        result: _R = pickle.loads(_result_file(Path(folder), 0).read_bytes())
        return result


def _run_one(_: int, folder: Path, function: Callable[..., object], args: tuple, kwargs: dict) -> None:
    silence()
    torch.set_num_threads(1)
    _result_file(folder, 0).write_bytes(pickle.dumps(function(*args, **kwargs)))


def _run_rank(
    rank: int, num_ranks: int, folder: Path, function: Callable[..., object], args: tuple, kwargs: dict
) -> None:
    silence()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    _result_file(folder, rank).write_bytes(pickle.dumps(function(*args, **kwargs)))
    dist.barrier()
    dist.destroy_process_group()


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"result.{rank}"


def silence() -> None:
    """No messages but our own: Lightning's advice is about long runs, and these are short."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
