"""Lightning callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor
from typing_extensions import override

from fsdp_strategy.engine import FullyShardedEngine
from fsdp_strategy.engine.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    import lightning.pytorch as pl


class JoinPrediction(Callback):
    """Put in by the strategy: a rank that has predicted its last batch takes part in the gathers of the others.

    Prediction deals every sample out once, so ranks may have different numbers of batches.
    """

    @classmethod
    def put_first(cls, trainer: pl.Trainer) -> None:
        """Run before the user's callbacks, whose collectives must find all ranks together."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, cls) for callback in callbacks):
            callbacks.insert(0, cls())

    @override
    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.engine.join_while_others_run("prediction")  # type: ignore[attr-defined]


def shard_averages(trainer: pl.Trainer, engine: FullyShardedEngine) -> None:
    """Shard the averages that `WeightAveraging` callbacks have made as whole copies of the module.

    Their updates, swaps and copies are elementwise between parameters that are cut alike: no communication.

    Raises:
        ValueError: if the averages are to live on another device than the parameters.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        average = callback._average_model if isinstance(callback, WeightAveraging) else None
        if average is not None:
            _check_device(callback, engine.mesh.device)
            _shard_average(average.module, engine)


def _check_device(callback: WeightAveraging, device: torch.device) -> None:
    wanted = callback._device
    if wanted is not None and torch.device(wanted).type != device.type:
        raise ValueError(
            f"Expected {type(callback).__name__}(device=...) to be the device of the parameters, {device}, got "
            f"{wanted}. Leave it out: the averages are sharded over all ranks."
        )


@torch.no_grad()
def _shard_average(average: torch.nn.Module, engine: FullyShardedEngine) -> None:
    modules, originals = dict(average.named_modules()), dict(engine.module.named_modules())
    places = {(id(owner), name): fqn for fqn, owner in originals.items() for name in owner._parameters}
    for param in engine.params:
        copy: Any = param.sharded.like(param.local.clone())
        assert isinstance(copy, ShardedTensor)
        copy.requires_grad_(param.sharded.requires_grad)
        copy._is_param = True
        for owner, name in param.sites:
            modules[places[id(owner), name]]._parameters[name] = copy
    for fqn, original in originals.items():
        for name, buffer in original._buffers.items():
            if isinstance(buffer, Tensor):
                modules[fqn]._buffers[name] = buffer.clone()
