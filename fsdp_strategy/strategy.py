"""The Lightning Strategy: sets the engine up, opens and ends its iterations, saves and loads. All methods are short."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from fsdp_strategy import _compat
from fsdp_strategy.callbacks import JoinPrediction, shard_averages
from fsdp_strategy.checkpoint import (
    full_optimizer_state_dict,
    full_state_dict,
    gather_sharded,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from fsdp_strategy.engine import EngineConfig, FullyShardedEngine, LocalStep, ShardMesh, restore
from fsdp_strategy.engine.elementwise import check_elementwise
from fsdp_strategy.engine.optimizer import check_holds_shards
from fsdp_strategy.foreign_arguments import meets_foreign_arguments
from fsdp_strategy.loaders import end_together
from fsdp_strategy.precision import ShardedPrecision, shard_precision
from fsdp_strategy.ranks import RankedStrategy, StartMethod

if TYPE_CHECKING:
    import lightning.pytorch as pl

# How long a rank that failed waits for the others to save a checkpoint with it.
_SAVE_TIMEOUT = timedelta(seconds=5)

ReduceDtype = Literal["auto", "float32", "float64", "bfloat16", "float16"]


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"Expected {name} to be one of {', '.join(map(repr, choices))}, got {value!r}.")
    return value


class FullyShardedStrategy(RankedStrategy):
    """Trains a plain LightningModule with parameters, gradients and optimizer state sharded over all ranks.

    Every unit (usually one block) is gathered just before it computes and freed after; the next one is gathered
    meanwhile. Gradients are summed in fp32, averaged, and kept sharded. The module needs no changes.

    Args:
        units: which modules are gathered and freed as one. "auto" finds the repeated blocks; or classes, class
            names, class paths and FQN patterns such as "layers.*", one or several; or a predicate
            `(fqn, module) -> bool`.
        unit_cap_mib: most MiB of parameters in a unit. Larger units are split into the modules inside them, tiny ones
            dissolved into those around them. Smaller units need less memory and more messages.
        layout: "per_parameter" cuts every parameter along dim 0 as `torch.chunk` does; "flat" lays those of a unit
            end to end and cuts the whole into equal pieces.
        prefetch_limit: units gathered ahead of the one that computes. 0 saves memory and waits for every gather.
        reshard_after_forward: whether units are freed between forward and backward; or by FQN pattern of units. False
            (ZeRO-2) sends a third less and holds all parameters in between.
        reduce_dtype: dtype in which gradients are summed over ranks. "auto" is float32, or the parameter's own
            dtype where that is wider.
        reduce_wire: dtype in which gradients travel. "param_dtype" sends those of 16-bit parameters as they are,
            half the bytes, and sums them in `reduce_dtype` where they arrive.
        accumulate: what micro-batches of `accumulate_grad_batches` add up. "sharded": reduced shards, a reduction for
            each. "unsharded": whole gradients on every rank, reduced once; costs 4 bytes per parameter and rank.
        reshard_after_backward: False keeps parameters unsharded over the micro-batches of `accumulate="unsharded"`.
        activation_checkpointing: whose activations are computed again in backward instead of being kept: "units" for
            those of every unit, or classes, class names and FQN patterns as for `units`. Costs one more forward.
        start_method: how ranks are started where no launcher has done so: "popen" runs the script again, "spawn"
            and "fork" start processes.
        process_group_backend: "nccl", "gloo", ...; the default of the device where None.
        timeout: of collectives.
        accelerator: passed on by the Trainer.
        parallel_devices: passed on by the Trainer.
        cluster_environment: passed on by the Trainer.
        checkpoint_io: writes and reads full checkpoints.
        precision_plugin: passed on by the Trainer.

    Raises:
        ValueError: for a choice that does not exist.
    """

    _is_save_agreed: bool | None = None  # after an exception

    @meets_foreign_arguments
    def __init__(
        self,
        *,
        units: str | type[nn.Module] | list[str | type[nn.Module]] | Callable[[str, nn.Module], bool] = "auto",
        unit_cap_mib: float | None = None,
        layout: Literal["per_parameter", "flat"] = "per_parameter",
        prefetch_limit: int = 1,
        reshard_after_forward: bool | dict[str, bool] = True,
        reduce_dtype: ReduceDtype = "auto",
        reduce_wire: Literal["reduce_dtype", "param_dtype"] = "reduce_dtype",
        accumulate: Literal["sharded", "unsharded"] = "sharded",
        reshard_after_backward: bool = True,
        activation_checkpointing: str | type[nn.Module] | list[str | type[nn.Module]] | None = None,
        start_method: StartMethod = "popen",
        process_group_backend: str | None = None,
        timeout: timedelta | None = _compat.default_pg_timeout,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        """Nothing is allocated or launched before the Trainer runs."""
        _choice("start_method", start_method, ("popen", "spawn", "fork"))
        _choice("reduce_dtype", reduce_dtype, ("auto", "float32", "float64", "bfloat16", "float16"))
        if accumulate == "sharded" and not reshard_after_backward:
            raise ValueError(
                "Expected reshard_after_backward=False only with accumulate='unsharded', got accumulate='sharded', "
                "where it would do nothing. Pass both, or leave it out."
            )
        self._accumulate = _choice("accumulate", accumulate, ("sharded", "unsharded"))
        self._config = EngineConfig(
            units=units,
            unit_cap_mib=unit_cap_mib,
            reshard_after_forward=reshard_after_forward,
            reshard_after_backward=reshard_after_backward,
            layout=layout,
            prefetch_limit=prefetch_limit,
            reduce_dtype=None if reduce_dtype == "auto" else getattr(torch, reduce_dtype),
            reduce_wire=reduce_wire,
            activation_checkpointing=activation_checkpointing,
        )
        super().__init__(
            start_method=start_method,
            process_group_backend=process_group_backend,
            timeout=timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._mesh: ShardMesh | None = None
        self._engine: FullyShardedEngine | None = None
        self._local_steps: list[LocalStep] = []

    # -- what the Trainer asks ----------------------------------------------------------------------------------------

    @property
    def engine(self) -> FullyShardedEngine:
        """The engine that shards the module.

        Raises:
            RuntimeError: before the Trainer has set the strategy up.
        """
        if self._engine is None:
            raise RuntimeError(
                "Expected a strategy that the Trainer has set up, got one that has no engine yet. "
                "Use it in hooks that run after setup, such as on_fit_start."
            )
        return self._engine

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # weights are loaded into the shards

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @property
    @override
    def precision_plugin(self) -> ShardedPrecision:
        if self._precision_plugin is None:
            self._precision_plugin = ShardedPrecision()
        assert isinstance(self._precision_plugin, ShardedPrecision)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else shard_precision(precision_plugin)

    # -- setting up and tearing down ----------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._mesh is None:
            self._mesh = ShardMesh(self.root_device, timeout=self._timeout)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        assert self._mesh is not None
        self.accelerator.setup(trainer)
        self._is_save_agreed = None
        is_fit = trainer.state.fn == _compat.TrainerFn.FITTING
        if self._engine is None or self._engine.module is not self.lightning_module:
            if self._layer_sync is not None:
                self._layer_sync.apply(self.lightning_module)
            self.precision_plugin.convert_module(self.lightning_module)
            self._engine = self._make_engine()
        self.precision_plugin.attach(self._engine)
        shard_averages(trainer, self._engine)
        self.model = self.lightning_module
        self.model_to_device()
        if is_fit:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fit:
            _compat._optimizers_to_device(self.optimizers, self.root_device)
        if trainer.state.fn == _compat.TrainerFn.PREDICTING:
            JoinPrediction.put_first(trainer)

    def _make_engine(self) -> FullyShardedEngine:
        """Shard the module, or go on with the engine that shards it for another strategy."""
        assert self.lightning_module is not None
        assert self._mesh is not None
        param_dtypes = self.precision_plugin.param_dtypes(self.lightning_module)
        config = dataclasses.replace(self._config, param_dtypes=param_dtypes)
        for engine in FullyShardedEngine.live():
            if engine.module is self.lightning_module:
                if engine.config == config and engine.mesh.is_alive:
                    return engine
                restore(engine)
        return FullyShardedEngine(self.lightning_module, self._mesh, config)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Training and validation end on all ranks together. Prediction does not: see `JoinPrediction`."""
        assert self.lightning_module is not None
        if self._mesh is None or self.lightning_module.trainer.state.fn == _compat.TrainerFn.PREDICTING:
            return dataloader
        return end_together(dataloader, self._mesh.collectives)

    @override
    def model_to_device(self) -> None:
        """Parameters and buffers are there already; metrics keep state that is neither."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if hasattr(module, "_defaults") and hasattr(module, "_device"):  # a torchmetrics Metric
                module.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []
        super().setup_optimizers(trainer)
        for number, optimizer in enumerate(self.optimizers):
            check_holds_shards(optimizer, number, self.engine)
        for optimizer in self.optimizers:
            check_elementwise(optimizer, self._config.layout)
        self._local_steps = [LocalStep(optimizer, self.engine.params) for optimizer in self.optimizers]

    @override
    def teardown(self) -> None:
        """Release plugins. The module stays sharded where it is: its memory is the engine's."""
        assert self.accelerator is not None
        if self._layer_sync is not None and self.lightning_module is not None and self._engine is None:
            self._layer_sync.revert(self.lightning_module)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._engine is not None:
            self._engine.abandon()

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self.engine.begin("training")
        with self.engine.step():
            output = super().training_step(*args, **kwargs)
        if not self.lightning_module.automatic_optimization or output is None:
            self.engine.end()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.iteration("validation"):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.iteration("test"):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.engine.iteration("prediction"):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The Trainer enters it around all but the last micro-batch; users may in manual optimization."""
        with self.engine.accumulating() if self._accumulate == "unsharded" else nullcontext():
            yield

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if self.engine.has_accumulated and not self.lightning_module.automatic_optimization:
            raise RuntimeError(
                f"[rank {self.global_rank}] Expected reduced gradients at the optimizer step, got some that are still "
                "accumulated on each rank. Run the last backward before the step outside of block_backward_sync."
            )
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.engine.watch_loss(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            self.engine.end()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole CPU tensors on rank 0, empty elsewhere. All ranks must call it."""
        assert self.lightning_module is not None
        return full_state_dict(self.engine, self.lightning_module) if self._agree_to_save() else {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Whole CPU tensors on rank 0, empty elsewhere. All ranks must call it."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return full_optimizer_state_dict(self.engine, optimizer) if self._agree_to_save() else {}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_full_state_dict(self.lightning_module, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"Expected a checkpoint of {len(self.optimizers)} optimizers, got one of {len(states)}. Resume with "
                "the optimizers it was saved with, or load only its weights."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_full_optimizer_state_dict(optimizer, state)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if not self._agree_to_save():
            if self._engine is not None:
                rank_zero_warn(
                    f"{filepath} is not written: it needs all ranks, and not all of them have come to save it."
                )
            return
        checkpoint = gather_sharded(self.engine, checkpoint)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _agree_to_save(self) -> bool:
        """After an exception, only if every rank has come to save: one alone would wait for others and hide its error.

        The process that has forked or spawned the ranks holds no trained weights and does not save either.
        """
        if self._engine is None:
            return False
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.status != _compat.TrainerStatus.INTERRUPTED:
            return True
        if self._is_save_agreed is None:
            self._engine.abandon()
            self._is_save_agreed = self._engine.mesh.collectives.all_arrive(_SAVE_TIMEOUT)
        return self._is_save_agreed

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._is_save_agreed is not False:
            super().barrier(*args, **kwargs)
