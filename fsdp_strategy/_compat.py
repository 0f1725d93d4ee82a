"""Every private name of Lightning that this package uses, in one place: what to look at when Lightning changes."""

from __future__ import annotations

from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero
from lightning_utilities.core import rank_zero as utils_rank_zero
from torch.distributed.constants import default_pg_timeout

__all__ = [
    "TrainerFn",
    "TrainerStatus",
    "_MultiProcessingLauncher",
    "_SubprocessScriptLauncher",
    "_WorkerOutput",
    "_distributed_is_initialized",
    "_get_default_process_group_backend_for_device",
    "_init_dist_connection",
    "_interrupt",
    "_optimizers_to_device",
    "_sync_ddp_if_available",
    "default_pg_timeout",
    "reset_seed",
    "set_rank_zero",
]


def set_rank_zero(rank: int) -> None:
    """Tell both copies of `rank_zero_only` (Lightning's and that of its utilities package) this process's rank."""
    for module in (rank_zero, utils_rank_zero):
        vars(module)["rank_zero_only"].rank = rank
