"""What races under a Lightning Trainer: one model, one optimizer, one kind of batch, under each strategy.

`ours` is this package in its default layout, `ours_flat` and the like in the others. `fully_shard` is torch's FSDP2 as
Lightning offers it: `configure_model` shards every block and then the module. `ddp` is Lightning's DDP. `limit` is the
same work on every rank without any communication, which nothing that averages gradients can beat.
"""

import gc
import time
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from _models import Batch, Blocks, Work, loss_of
from _trainees import OURS as LAYOUTS
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from fsdp_strategy import FullyShardedStrategy
from fsdp_strategy.ranks import JoinedRanks

_OPTIONS = signature(FullyShardedStrategy).parameters

# What FullyShardedStrategy is given, by contender. What it cannot be given yet does not race.
OURS: dict[str, dict[str, str]] = {
    name: {} if name == "ours" else {"layout": layout}
    for name, layout in LAYOUTS.items()
    if name == "ours" or "layout" in _OPTIONS
}
# The low-precision wire differs from the other only where gradients have low precision.
LOW_WIRE: dict[str, dict[str, str]] = {
    f"{name}_wire": {**options, "reduce_wire": "param_dtype"}
    for name, options in OURS.items()
    if "reduce_wire" in _OPTIONS
}
CONTENDERS = (*OURS, *LOW_WIRE, "fully_shard", "ddp", "limit")


class Transformer(L.LightningModule):
    """The blocks; `losses` has this rank's loss of every step."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layers = Blocks(work).layers
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = loss_of(self, batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class FullyShardTransformer(Transformer):
    """The same, sharded by torch."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh)


def make_model(name: str, work: Work) -> Transformer:
    """Equal initial weights on all ranks and for all contenders."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (FullyShardTransformer if name == "fully_shard" else Transformer)(work)


def make_strategy(name: str) -> Strategy:
    """As a user would write it, with all defaults."""
    ours = {**OURS, **LOW_WIRE}
    if name in ours:
        return FullyShardedStrategy(**ours[name])
    if name == "fully_shard":
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    if name == "ddp":
        return DDPStrategy()
    if name == "limit":
        return SingleDeviceStrategy("cpu")
    raise ValueError(f"Expected a contender out of {', '.join(CONTENDERS)}, got {name!r}.")


@dataclass(slots=True)
class Fit:
    """The steps of one rank in one fit, in order. Times are of the timed steps, losses of all."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Stopwatch(L.Callback):
    """Times every step after the warm-up, from the end of the step before: nothing a step costs falls in between.

    CPU time is that of the whole rank process, so it includes the threads of the backend.
    """

    def __init__(self, num_warmup: int) -> None:
        self.fit = Fit()
        self._num_warmup = num_warmup
        self._mark = (0.0, 0.0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        if trainer.global_step > self._num_warmup:
            self.fit.wall_ms.append(1e3 * (wall - self._mark[0]))
            self.fit.cpu_ms.append(1e3 * (cpu - self._mark[1]))
        self._mark = wall, cpu


def fit(name: str, work: Work, *, num_warmup: int, num_steps: int, precision: str = "32-true") -> Fit:
    """Train a fresh model under a fresh Trainer. All ranks must call it."""
    gc.collect()
    model, stopwatch = make_model(name, work), Stopwatch(num_warmup)
    batches = work.batches(num_warmup + num_steps, rank=dist.get_rank())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if name == "limit" else dist.get_world_size(),
        strategy=make_strategy(name),
        plugins=[] if name == "limit" else [JoinedRanks()],
        max_epochs=1,
        callbacks=[stopwatch],
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    dist.barrier()
    trainer.fit(model, DataLoader(batches, batch_size=None))
    stopwatch.fit.losses = torch.stack(model.losses).tolist()
    return stopwatch.fit
