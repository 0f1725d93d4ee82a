"""Lightning callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

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
