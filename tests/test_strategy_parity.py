"""`Trainer.fit` with the strategy trains as `ddp` does, and as one device does on the joined batch."""

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torchmetrics import MeanMetric

from fsdp_strategy.engine.sharded_tensor import ShardedTensor
from fsdp_strategy.ranks import JoinedRanks
from tests.layouts import both_layouts
from tests.models import Batch, Tiny, TinyWithStages, dealt_loader, loader, seeded
from tests.pooled_trainer import make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

NUM_SAMPLES = 48
JOINED_BATCH = 12

# Two ranks sum two gradients, one device sums the joined batch: fp32 rounds differently, 4 steps and lr 0.05 keep
# it near 1e-7. AdamW divides by the root of the second moment, which magnifies the rounding of small gradients.
SGD_TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
ADAMW_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass
class Run:
    """What a fit came to, on one rank."""

    losses: list[float]
    weights: dict[str, Tensor]  # whole, rank 0 only
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A way to train."""

    cls: type[Tiny] = Tiny
    model: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    finds_unused: bool = False  # what DDP must be told


class TwoOptimizers(Tiny):
    """Manual optimization, both optimizers step on one backward."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        body = [*self.stem.parameters(), *self.blocks.parameters()]
        return [
            torch.optim.SGD(body, lr=0.05, momentum=0.9),
            torch.optim.AdamW([*self.head.parameters(), self.scale], lr=0.05),
        ]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


class AlternatingOptimizers(TwoOptimizers):
    """As GANs do: one optimizer after the other, each with a forward, with only its own parameters trainable."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class ClippedManually(TwoOptimizers):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()[0]
        optimizer.zero_grad()
        self.manual_backward(Tiny.training_step(self, batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        optimizer.step()


class WithAClosure(TwoOptimizers):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()[0]

        def closure() -> Tensor | None:
            loss = Tiny.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


CASES = {
    "sgd": Case(),
    "adamw_and_a_scheduler": Case(model={"optimizer": "adamw"}),
    "clipping_by_value": Case(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "two_optimizers": Case(TwoOptimizers),
    "toggled_optimizers": Case(AlternatingOptimizers, finds_unused=True),
    "clipping_manually": Case(ClippedManually),
    "closure_by_hand": Case(WithAClosure),
}


def _fit(strategy: str | Strategy, case: Case, batch_size: int) -> Run:
    if strategy == "ddp":
        strategy = DDPStrategy(cluster_environment=JoinedRanks(), find_unused_parameters=case.finds_unused)
    model = seeded(case.cls, **case.model)
    trainer = make_trainer(strategy, **case.trainer)
    trainer.fit(model, dealt_loader(NUM_SAMPLES, batch_size))
    return Run(model.losses, weights(trainer), trainer.callback_metrics)


def _assert_close(run: Run, reference: Run, tolerance: dict[str, float]) -> None:
    assert run.weights.keys() == reference.weights.keys()
    for fqn, tensor in reference.weights.items():
        torch.testing.assert_close(run.weights[fqn], tensor, **tolerance, msg=lambda text, fqn=fqn: f"{fqn}: {text}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_ranks_train_bit_for_bit_as_ddp(ranks: RankPool, case: Case) -> None:
    ours = ranks.run(_fit, 2, "ours", case, JOINED_BATCH // 2)
    ddp = ranks.run(_fit, 2, "ddp", case, JOINED_BATCH // 2)
    _assert_close(ours[0], ddp[0], {"rtol": 0, "atol": 0})
    assert [run.losses for run in ours] == [run.losses for run in ddp]
    assert [run.metrics for run in ours] == [run.metrics for run in ddp]


# The optimizers at every world size; what happens around them does not depend on it.
JOINED = [(name, size) for name in CASES for size in (2, 3, 4) if size == 3 or name in ("sgd", "adamw_and_a_scheduler")]


@pytest.mark.parametrize(("name", "world_size"), JOINED)
def test_ranks_train_as_one_device_on_the_joined_batch(ranks: RankPool, name: str, world_size: int) -> None:
    case = CASES[name]
    runs = ranks.run(_fit, world_size, "ours", case, JOINED_BATCH // world_size)
    [single] = ranks.run(_fit, 1, "single", case, JOINED_BATCH)
    tolerance = SGD_TOLERANCE if name == "sgd" else ADAMW_TOLERANCE
    _assert_close(runs[0], single, tolerance)
    mean_losses = torch.tensor([run.losses for run in runs]).mean(0)
    torch.testing.assert_close(mean_losses, torch.tensor(single.losses), **tolerance)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_rank_trains_bit_for_bit_as_one_device(ranks: RankPool, case: Case) -> None:
    [ours] = ranks.run(_fit, 1, "ours", case, JOINED_BATCH)
    [single] = ranks.run(_fit, 1, "single", case, JOINED_BATCH)
    _assert_close(ours, single, {"rtol": 0, "atol": 0})
    assert ours.losses == single.losses


# 3 does not divide the 8 batches: the last window is short, and Lightning still divides by 3.
@pytest.mark.parametrize("windows", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accumulated_batches_train_as_on_one_device(ranks: RankPool, world_size: int, windows: int) -> None:
    case = Case(trainer={"accumulate_grad_batches": windows})
    runs = ranks.run(_fit, world_size, "ours", case, 6 // world_size)
    [single] = ranks.run(_fit, 1, "single", case, 6)
    _assert_close(runs[0], single, SGD_TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_clipping_by_norm_sees_the_gradients_of_all_ranks(ranks: RankPool, world_size: int) -> None:
    case = Case(trainer={"gradient_clip_val": 0.1})
    runs = ranks.run(_fit, world_size, "ours", case, JOINED_BATCH // world_size)
    [single] = ranks.run(_fit, 1, "single", case, JOINED_BATCH)
    [unclipped] = ranks.run(_fit, 1, "single", Case(), JOINED_BATCH)
    _assert_close(runs[0], single, SGD_TOLERANCE)
    assert not torch.allclose(single.weights["head.weight"], unclipped.weights["head.weight"], atol=1e-3)


class Unfreezing(BaseFinetuning):
    """The stem is frozen at first and joins the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.stem)

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.stem, optimizer)


class Trainable(Tiny):
    """Its optimizer holds what can be trained."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([param for param in self.parameters() if param.requires_grad], lr=0.05)


@pytest.mark.parametrize("world_size", [1, 3])
def test_layers_that_are_unfrozen_later_train_as_on_one_device(ranks: RankPool, world_size: int) -> None:
    case = Case(Trainable, trainer={"max_epochs": 2, "callbacks": [Unfreezing()]})
    runs = ranks.run(_fit, world_size, "ours", case, JOINED_BATCH // world_size)
    [single] = ranks.run(_fit, 1, "single", case, JOINED_BATCH)
    _assert_close(runs[0], single, SGD_TOLERANCE)
    assert not torch.equal(single.weights["stem.weight"], seeded().stem.weight)


def test_a_root_parameter_read_in_training_step_trains(ranks: RankPool) -> None:
    run = ranks.run(_fit, 2, "ours", Case(), JOINED_BATCH // 2)[0]
    assert run.weights["scale"].item() != seeded().scale.item()


def _fit_unseeded(strategy: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = Tiny()  # the pool has seeded every rank with its number
    stem = model.stem.weight.detach().clone()
    trainer = make_trainer(strategy)
    trainer.fit(model, loader(NUM_SAMPLES, 6))
    return stem, weights(trainer)


def test_ranks_with_different_weights_start_from_those_of_rank_0(ranks: RankPool) -> None:
    ours, ddp = ranks.run(_fit_unseeded, 2, "ours"), ranks.run(_fit_unseeded, 2, "ddp")
    assert not torch.equal(ours[0][0], ours[1][0])
    assert ours[0][1].keys() == ddp[0][1].keys()
    assert all(torch.equal(ours[0][1][fqn], tensor) for fqn, tensor in ddp[0][1].items())


class WithMetric(TinyWithStages):
    """Logs a metric object, whose state is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.mean(self.loss(batch))
        self.log("val_mean", self.mean)


def _fit_with_validation(strategy: str, num_sanity_val_steps: int = 0) -> Run:
    model = seeded(WithMetric)
    trainer = make_trainer(strategy, max_epochs=2, num_sanity_val_steps=num_sanity_val_steps, val_check_interval=2)
    trainer.fit(model, loader(NUM_SAMPLES, 6), loader(20, 3))
    return Run(model.losses, weights(trainer), trainer.callback_metrics)


def test_synchronised_validation_metrics_equal_those_of_ddp(ranks: RankPool) -> None:
    ours, ddp = ranks.run(_fit_with_validation, 2, "ours"), ranks.run(_fit_with_validation, 2, "ddp")
    for name in ("val_loss", "val_mean"):
        assert ours[0].metrics[name] == ours[1].metrics[name] == ddp[0].metrics[name]


def test_sanity_validation_changes_nothing(ranks: RankPool) -> None:
    with_sanity = ranks.run(_fit_with_validation, 2, "ours", num_sanity_val_steps=2)
    without = ranks.run(_fit_with_validation, 2, "ours")
    _assert_close(with_sanity[0], without[0], {"rtol": 0, "atol": 0})
    assert with_sanity[0].losses == without[0].losses


class Listening(Tiny):
    """Notes the first feature of every sample that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        self.seen += batch[0][:, 0].tolist()
        return super().training_step(batch, batch_idx)


def _seen() -> list[float]:
    model = seeded(Listening)
    make_trainer().fit(model, loader(NUM_SAMPLES, 4))
    return model.seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_sample_is_trained_on_by_exactly_one_rank(ranks: RankPool, world_size: int) -> None:
    seen = ranks.run(_seen, world_size)
    everything = next(iter(loader(NUM_SAMPLES, NUM_SAMPLES)))[0][:, 0].tolist()
    assert sorted(value for part in seen for value in part) == sorted(everything)
    assert {len(part) for part in seen} == {NUM_SAMPLES // world_size}


class GradientWitness(pl.Callback):
    """Keeps the gradients as they are when the backward has just ended, and when the optimizer is about to step."""

    def __init__(self) -> None:
        self.after_backward: list[Tensor] = []
        self.before_step: list[Tensor] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after_backward = [_local(param.grad).clone() for param in pl_module.parameters()]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.before_step = [_local(param.grad).clone() for param in pl_module.parameters()]


def _local(grad: Tensor | None) -> Tensor:
    assert isinstance(grad, ShardedTensor)
    return grad.to_local()


def _assert_gradients_final_after_backward() -> None:
    witness = GradientWitness()
    make_trainer(callbacks=[witness], max_steps=2).fit(seeded(), loader(NUM_SAMPLES, 4))
    assert len(witness.after_backward) == len(list(Tiny().parameters()))
    assert all(torch.equal(a, b) for a, b in zip(witness.after_backward, witness.before_step, strict=True))
    assert any(grad.any() for grad in witness.after_backward) or dist.get_rank() > 0


def test_gradients_are_final_in_on_after_backward(ranks: RankPool) -> None:
    ranks.run(_assert_gradients_final_after_backward, 2)
