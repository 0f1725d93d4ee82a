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
from lightning.fabric.plugins import ClusterEnvironment

_P = ParamSpec("_P")
_R = TypeVar("_R")


class JoinedRanks(ClusterEnvironment):
    """Tells a Trainer about ranks that are in a process group already: nothing is started, nobody meets again."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise AssertionError("The ranks have met already.")

    @property
    def main_port(self) -> int:
        raise AssertionError("The ranks have met already.")

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


def run_on_ranks(num_ranks: int, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> list[_R]:
    """What `function` returns on each of `num_ranks` fresh processes, in rank order. An exception on any is raised."""
    with tempfile.TemporaryDirectory() as folder:
        job = (num_ranks, Path(folder), function, args, kwargs)
        mp.start_processes(_run_rank, args=job, nprocs=num_ranks, start_method="fork")
        return [pickle.loads(_result_file(Path(folder), rank).read_bytes()) for rank in range(num_ranks)]


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
