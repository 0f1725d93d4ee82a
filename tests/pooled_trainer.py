"""A Trainer on the ranks of the pool, whose process group is there already: no process is started."""

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor

from fsdp_strategy import FullyShardedStrategy
from fsdp_strategy.ranks import JoinedRanks
from tests import layouts


def make_strategy(name: str = "ours", **kwargs: Any) -> Strategy:
    """`ours`, `ddp`, or `single` for one device without any distribution."""
    if name == "single":
        return SingleDeviceStrategy("cpu", **kwargs)
    if name == "ours":
        return FullyShardedStrategy(**{"layout": layouts.current(), "cluster_environment": JoinedRanks(), **kwargs})
    return DDPStrategy(cluster_environment=JoinedRanks(), **kwargs)


def make_trainer(strategy: str | Strategy = "ours", **kwargs: Any) -> pl.Trainer:
    """A quiet Trainer on all ranks of the pool: one epoch, no sanity validation, nothing written, unless asked for."""
    quiet = {
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if isinstance(strategy, str):
        strategy = make_strategy(strategy)
    devices = 1 if isinstance(strategy, SingleDeviceStrategy) else dist.get_world_size()
    return pl.Trainer(**{"accelerator": "cpu", "devices": devices, "strategy": strategy, **quiet, **kwargs})


def weights(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Whole tensors on rank 0. All ranks must call it."""
    return {fqn: tensor.clone() for fqn, tensor in trainer.strategy.lightning_module_state_dict().items()}
