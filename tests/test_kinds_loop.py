"""Whatever training loops people write, `Trainer.fit` comes to what it comes to with `ddp`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanSquaredError, MetricCollection

from tests.layouts import both_layouts
from tests.models import Batch, Block, Tiny, TinyWithStages, dealt_loader, loader, seeded
from tests.pooled_trainer import make_strategy, make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

# Two ranks sum as DDP does, three in another order, and fused optimizers and norms round in theirs: a dozen steps carry
# a few roundings of 2**-24; AdamW divides by the root of the second moment, which magnifies those of small gradients.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A module with its Trainer.

    Attributes:
        trainer: arguments, made anew for every Trainer.
        num_samples: in all; 24 are 4 steps of 2 samples on 3 ranks.
        find_unused: what DDP must be told.
    """

    cls: type[Tiny] = TinyWithStages
    trainer: Callable[[], dict[str, Any]] = dict
    num_samples: int = 24
    find_unused: bool = False


@dataclass
class Outcome:
    losses: list[float]
    notes: list[Any]
    metrics: dict[str, Tensor]
    weights: dict[str, Tensor] = field(default_factory=dict)  # whole, on rank 0


class Noting(TinyWithStages):
    """`notes` are compared."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.notes: list[Any] = []


# -- optimizers and schedulers ----------------------------------------------------------------------------------------


class Fused(TinyWithStages):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4, fused=True)


class Foreach(TinyWithStages):
    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters(), lr=0.01, eps=1e-4, foreach=True)


class Grouped(TinyWithStages):
    """Groups by name, with settings of their own, and a learning rate that falls with the depth."""

    def configure_optimizers(self) -> Any:
        groups = []
        for index, (name, param) in enumerate(self.named_parameters()):
            decay = 0.0 if name.endswith("bias") or param.ndim < 2 else 0.1
            groups.append({"params": [param], "lr": 0.02 * 0.9**index, "weight_decay": decay})
        return torch.optim.SGD(groups, momentum=0.5)


class OneCycle(Noting):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        total = int(self.trainer.estimated_stepping_batches)
        self.notes.append(total)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, *args: Any) -> None:
        self.notes.append(self.optimizers().param_groups[0]["lr"])


class Plateau(Noting):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def on_train_epoch_end(self) -> None:
        self.notes.append(self.optimizers().param_groups[0]["lr"])


# -- manual optimization ----------------------------------------------------------------------------------------------


class Adversarial(Noting):
    """A generator and a discriminator with an optimizer each, toggled, the second one stepping every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(2, 5), Block(), Block(), nn.Linear(5, 1))

    def configure_optimizers(self) -> Any:
        generator = [p for name, p in self.named_parameters() if not name.startswith("critic")]
        return [torch.optim.SGD(generator, lr=0.05), torch.optim.AdamW(self.critic.parameters(), lr=0.01, eps=1e-4)]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = -self.critic(self(x) * self.scale).mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        self.losses.append(loss.item())
        if batch_idx % 2:
            self.toggle_optimizer(second)
            with torch.no_grad():
                fake = self(x)
            loss = self.critic(fake).mean() - self.critic(y).mean() + self.critic(y).square().mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            self.untoggle_optimizer(second)
            self.losses.append(loss.item())


class AccumulatedByHand(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch) / 2
        self.losses.append(loss.item())
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()
            self.notes.append(self.optimizers().param_groups[0]["lr"])


# -- callbacks and metrics --------------------------------------------------------------------------------------------


class MovingAverage(pl.Callback):
    """What people write by hand: a shadow of every parameter, put into the model for validation and at the end."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.shadow = {name: param.detach().clone() for name, param in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        with torch.no_grad():
            for name, param in pl_module.named_parameters():
                self.shadow[name].mul_(0.8).add_(param.detach(), alpha=0.2)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kept = {name: param.data.clone() for name, param in pl_module.named_parameters()}
        self._show(pl_module, self.shadow)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(pl_module, self.kept)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._show(pl_module, self.shadow)

    def _show(self, pl_module: pl.LightningModule, values: dict[str, Tensor]) -> None:
        for name, param in pl_module.named_parameters():
            param.data.copy_(values[name])


class Stopping(Noting):
    def on_train_epoch_end(self) -> None:
        self.notes.append(self.current_epoch)


class Logging(Noting):
    """Logs values of its own rank, synchronised, and metrics that are part of the module and of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.blocks[1].seen = MetricCollection({"largest": MaxMetric()})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("rank", float(dist.get_rank() + batch_idx), sync_dist=True, on_epoch=True)
        self.log("highest", float(dist.get_rank()), sync_dist=True, reduce_fx="max")
        self.error(self(batch[0]).detach(), batch[1])
        self.log("error", self.error, on_epoch=True, on_step=True)
        self.blocks[1].seen.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.notes.append(float(self.blocks[1].seen.compute()["largest"]))


LOOPS: dict[str, Loop] = {
    "fused": Loop(cls=Fused),
    "foreach": Loop(cls=Foreach, trainer=lambda: {"gradient_clip_val": 0.1}),
    "groups by name": Loop(cls=Grouped),
    "one cycle": Loop(cls=OneCycle, trainer=lambda: {"max_epochs": 2, "accumulate_grad_batches": 2}),
    "plateau": Loop(cls=Plateau, trainer=lambda: {"max_epochs": 3}),
    "adversarial": Loop(cls=Adversarial, find_unused=True),
    "accumulated by hand": Loop(cls=AccumulatedByHand),
    "moving average": Loop(trainer=lambda: {"callbacks": [MovingAverage()], "max_epochs": 2}),
    "stochastic weight averaging": Loop(
        trainer=lambda: {"callbacks": [StochasticWeightAveraging(0.02, swa_epoch_start=1)], "max_epochs": 4}
    ),
    "early stopping": Loop(
        cls=Stopping,
        trainer=lambda: {"callbacks": [EarlyStopping("val_loss", patience=1, mode="max")], "max_epochs": 6},
    ),
    "synchronised logs and metrics": Loop(cls=Logging, trainer=lambda: {"max_epochs": 2}),
    "uneven data": Loop(num_samples=17, trainer=lambda: {"max_epochs": 2}),
}


def _strategy(name: str, loop: Loop) -> Strategy:
    return make_strategy("ddp", find_unused_parameters=loop.find_unused) if name == "ddp" else make_strategy(name)


def _fit(strategy: str, name: str) -> Outcome:
    loop = LOOPS[name]
    model = seeded(loop.cls)
    trainer = make_trainer(_strategy(strategy, loop), **loop.trainer())
    trainer.fit(model, loader(loop.num_samples, 2), loader(7, 2))
    return Outcome(model.losses, getattr(model, "notes", []), dict(trainer.callback_metrics), weights(trainer))


def _assert_alike(ours: Outcome, ddp: Outcome) -> None:
    assert len(ours.losses) == len(ddp.losses)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(ddp.losses), **TOLERANCE)
    assert ours.notes == pytest.approx(ddp.notes, rel=1e-4)
    torch.testing.assert_close(ours.metrics, ddp.metrics, **TOLERANCE)
    if ours.weights:
        torch.testing.assert_close(ours.weights, ddp.weights, **TOLERANCE)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loop_comes_to_what_it_comes_to_with_ddp(ranks: RankPool, world_size: int, name: str) -> None:
    with ranks.timeout(40):
        ours, ddp = ranks.run(_fit, world_size, "ours", name), ranks.run(_fit, world_size, "ddp", name)
    assert ours[0].weights
    for one, other in zip(ours, ddp, strict=True):
        _assert_alike(one, other)


# -- several fits and models ------------------------------------------------------------------------------------------


def _fit_two_models_in_turn(strategy: str) -> list[Outcome]:
    """Two modules, two Trainers, each fitted twice, in turn."""
    outcomes = []
    models = [seeded(width=5), seeded(width=7, optimizer="adamw")]
    trainers = [make_trainer(strategy), make_trainer(strategy)]
    for epochs in (1, 2):
        for model, trainer in zip(models, trainers, strict=True):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(model, dealt_loader(24, 2))
            outcomes.append(Outcome(list(model.losses), [], {}, weights(trainer)))
    return outcomes


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_models_are_fitted_in_turn_as_with_ddp(ranks: RankPool, world_size: int) -> None:
    with ranks.timeout(40):
        both = [ranks.run(_fit_two_models_in_turn, world_size, name) for name in ("ours", "ddp")]
    for ours, ddp in zip(*both, strict=True):
        for one, other in zip(ours, ddp, strict=True):
            _assert_alike(one, other)


def _count() -> list[tuple[str, int]]:
    counts: list[tuple[str, int]] = []

    class Summarising(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            summary = summarize(pl_module, max_depth=2)
            counts.extend(zip(summary.layer_names, summary.param_nums, strict=True))
            counts.append(("trainable", summary.trainable_parameters))

    model = seeded()
    model.stem.requires_grad_(False)
    make_trainer(callbacks=[Summarising()], max_steps=1).fit(model, dealt_loader(24, 2))
    return counts


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_model_summary_counts_every_layer_as_without_sharding(ranks: RankPool, world_size: int) -> None:
    model = seeded()
    model.stem.requires_grad_(False)
    summary = summarize(model, max_depth=2)
    expected = [*zip(summary.layer_names, summary.param_nums, strict=True)]
    expected.append(("trainable", summary.trainable_parameters))
    assert ranks.run(_count, world_size) == [expected] * world_size
