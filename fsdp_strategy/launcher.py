"""Launch ranks by spawn or fork, and bring the whole trained weights back to the parent process."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from typing_extensions import override

from fsdp_strategy._compat import TrainerFn, _interrupt, _MultiProcessingLauncher, _WorkerOutput

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from fsdp_strategy.strategy import FullyShardedStrategy


class _RankFunction:
    """What a launched rank runs: the Trainer's function, and its `on_exception` hooks where that raises.

    Lightning runs those hooks only in the process that has launched the ranks, which has nothing to save.
    """

    def __init__(self, function: Callable[..., Any], trainer: pl.Trainer | None, *, is_forked: bool) -> None:
        self._function, self._trainer, self._is_forked = function, trainer, is_forked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_forked:
            torch.set_num_threads(1)  # OpenMP does not survive a fork with more
        try:
            return self._function(*args, **kwargs)
        except BaseException as error:
            if self._trainer is not None:
                _interrupt(self._trainer, error)
            raise


class ShardedMultiProcessingLauncher(_MultiProcessingLauncher):
    """Lightning's spawn and fork launcher for a model whose weights are sharded when the workers end."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if self._start_method == "fork" and dist.is_initialized():
            raise RuntimeError(
                "Expected no process group in the process that forks ranks, got one that is initialised, for example "
                "left by an earlier fit in this process. Forked ranks would hang. Call "
                "torch.distributed.destroy_process_group() first, or use start_method='spawn'."
            )
        function = _RankFunction(function, trainer, is_forked=self._start_method == "fork")
        # A forked rank must not collect what the parent left behind: a dead process group would join threads that
        # exist in the parent only.
        gc.collect()
        gc.freeze()
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        finally:
            gc.unfreeze()

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> _WorkerOutput | None:
        """As Lightning's, but with whole weights, gathered by all ranks and kept by rank 0."""
        strategy = cast("FullyShardedStrategy", self._strategy)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        state_dict = strategy.lightning_module_state_dict() if is_fit else {}
        if strategy.local_rank != 0:
            return None
        weights_path = None
        if is_fit:
            weights_path = os.path.join(tempfile.mkdtemp(), ".temp.ckpt")
            strategy.checkpoint_io.save_checkpoint(state_dict, weights_path)
        best_model_path = getattr(trainer.checkpoint_callback, "best_model_path", None)
        extra = self.get_extra_results(trainer)
        return _WorkerOutput(best_model_path, weights_path, trainer.state, results, extra)
