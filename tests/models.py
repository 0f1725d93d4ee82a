"""Small LightningModules for tests: odd sizes, a root parameter that `training_step` reads itself, a buffer."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IN_FEATURES, WIDTH, OUT_FEATURES, NUM_BLOCKS = 3, 5, 2, 3

Batch = list[Tensor]


class Block(nn.Module):
    """What "auto" makes a unit of."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tiny(pl.LightningModule):
    """A stem, blocks and a head; `losses` has the loss of every training step on this rank.

    Args:
        optimizer: "sgd" with momentum, or "adamw" with two groups and a learning rate that decays every step.
    """

    def __init__(self, *, optimizer: str = "sgd", lr: float = 0.05, width: int = WIDTH) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Linear(IN_FEATURES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(width, OUT_FEATURES)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((IN_FEATURES,), 0.25))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x + self.shift)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Batch) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x) * self.scale, y)  # the root parameter is read outside any module's forward

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        lr = self.hparams["lr"]
        if self.hparams["optimizer"] == "sgd":
            return torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)
        matrices = [param for param in self.parameters() if param.dim() > 1]
        vectors = [param for param in self.parameters() if param.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TinyWithStages(Tiny):
    """With validation, test and prediction, which need their loaders."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0])


def samples(num_samples: int, *, seed: int = 1) -> TensorDataset:
    """The same samples on every rank."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, IN_FEATURES, generator=generator)
    y = torch.randn(num_samples, OUT_FEATURES, generator=generator)
    return TensorDataset(x, y)


def loader(num_samples: int, batch_size: int) -> DataLoader[Any]:
    """For Lightning to inject a sampler into."""
    return DataLoader(samples(num_samples), batch_size=batch_size)


def dealt_loader(num_samples: int, batch_size: int) -> DataLoader[Any]:
    """In order, dealt out to the ranks: the batches of one step on all ranks join to consecutive samples."""
    dataset = samples(num_samples)
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset, shuffle=False))


def seeded(cls: type[Tiny] = Tiny, **kwargs: Any) -> Tiny:
    """The same initial weights on every rank and in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return cls(**kwargs)
