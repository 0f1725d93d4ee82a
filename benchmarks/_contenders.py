"""What races: one model, one optimizer, one kind of batch, trained by a Lightning Trainer under each strategy.

`ours` is this package. `fully_shard` is torch's FSDP2 as Lightning offers it: `configure_model` shards every block and
then the module. `ddp` is Lightning's DDP. `limit` is the same work on every rank without any communication, which
nothing that averages gradients can beat.
"""

import gc
import time
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _ranks import JoinedRanks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from fsdp_strategy import FullyShardedStrategy

CONTENDERS = ("ours", "fully_shard", "ddp", "limit")
SIZES = {"small": (1, 32), "medium": (2, 64), "large": (8, 128)}  # sequences in a batch of one rank, tokens in each

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The model and its batches. The defaults are a 12-block transformer of 37.8 million parameters."""

    batch_size: int
    num_tokens: int
    num_blocks: int = 12
    dim: int = 512
    num_heads: int = 8
    ffn_dim: int = 2048

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        attention = 4 * self.dim * self.dim + 4 * self.dim
        ffn = 2 * self.dim * self.ffn_dim + self.ffn_dim + self.dim
        return self.num_blocks * (attention + ffn + 4 * self.dim)

    def batches(self, num_batches: int, *, rank: int) -> list[Batch]:
        """Random inputs, different on every rank; the target is the input of the token before."""
        generator = torch.Generator().manual_seed(1000 + rank)
        shape = (self.batch_size, self.num_tokens, self.dim)
        inputs = [torch.randn(shape, generator=generator) for _ in range(num_batches)]
        return [(x, x.roll(1, dims=1)) for x in inputs]


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(work.dim)
        self.self_attn = nn.MultiheadAttention(work.dim, work.num_heads, batch_first=True)
        self.norm2 = nn.LayerNorm(work.dim)
        self.ffn = nn.Sequential(nn.Linear(work.dim, work.ffn_dim), nn.GELU(), nn.Linear(work.ffn_dim, work.dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.self_attn(normed, normed, normed, need_weights=False)[0]
        return x + self.ffn(self.norm2(x))


class Transformer(L.LightningModule):
    """Blocks and nothing else; `losses` has this rank's loss of every step."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerBlock(work) for _ in range(work.num_blocks))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
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
    if name == "ours":
        return FullyShardedStrategy()
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


def fit(name: str, work: Work, *, num_warmup: int, num_steps: int, callbacks: list[L.Callback] | None = None) -> Fit:
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
        callbacks=[stopwatch, *(callbacks or [])],
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
