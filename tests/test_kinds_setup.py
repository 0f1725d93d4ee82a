"""What is decided when a module is set up or a scaler steps: synchronised batch norms, a NaN on one rank."""

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from fsdp_strategy.precision import MixedPrecision, ShardedGradScaler
from tests.layouts import both_layouts
from tests.models import Batch, Tiny, TinyWithStages, dealt_loader, seeded
from tests.pooled_trainer import make_strategy, make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

two_and_three_ranks = pytest.mark.parametrize("world_size", [2, 3])


class Normalised(TinyWithStages):
    """With a batch norm in the root unit and one in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.blocks[1].norm = nn.BatchNorm1d(5)
        for norm in (self.norm, self.blocks[1].norm):
            norm.running_mean.fill_(0.3)
            norm.running_var.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x + self.shift))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _validate(strategy: str, sync_batchnorm: bool) -> tuple[float, list[str], dict[str, Tensor]]:
    model = seeded(Normalised)
    trainer = make_trainer(strategy, sync_batchnorm=sync_batchnorm)
    [logged] = trainer.validate(model, dealt_loader(12, 2), verbose=False)
    classes = [type(module).__name__ for module in model.modules() if "BatchNorm" in type(module).__name__]
    return logged["val_loss"], classes, weights(trainer)


@two_and_three_ranks
def test_sync_batchnorm_converts_every_batch_norm_and_keeps_its_values(ranks: RankPool, world_size: int) -> None:
    for ours, ddp in zip(
        ranks.run(_validate, world_size, "ours", True), ranks.run(_validate, world_size, "ddp", False), strict=True
    ):
        assert ours[1] == ["SyncBatchNorm"] * 2
        assert ours[0] == pytest.approx(ddp[0], rel=1e-5)  # a mean over ranks in another order
        if ours[2]:
            torch.testing.assert_close(ours[2], ddp[2], rtol=0, atol=0)


def _fit_normalised(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    model = seeded(Normalised)
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(model, dealt_loader(24, 2), dealt_loader(6, 2))
    return model.losses, weights(trainer)


@two_and_three_ranks
def test_the_statistics_of_batch_norms_are_those_of_rank_0_as_with_ddp(ranks: RankPool, world_size: int) -> None:
    ours, ddp = ranks.run(_fit_normalised, world_size, "ours"), ranks.run(_fit_normalised, world_size, "ddp")
    for (losses, _), (ddp_losses, _) in zip(ours, ddp, strict=True):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(ddp_losses), rtol=1e-5, atol=1e-6)
    assert "norm.running_var" in ours[0][1]
    torch.testing.assert_close(ours[0][1], ddp[0][1], rtol=1e-5, atol=1e-6)


class NotANumber(Tiny):
    """On the last rank the loss of one step is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[tuple[float, Tensor]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_hit = batch_idx == 1 and self.global_rank == self.trainer.world_size - 1
        return loss * float("nan") if is_hit else loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.states.append((self.trainer.precision_plugin.scaler.get_scale(), self.head.weight.full_tensor().clone()))


def _scaling() -> Strategy:
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    return make_strategy(precision_plugin=MixedPrecision("16-mixed", "cpu", scaler))


def _fit_with_a_nan() -> list[tuple[float, Tensor]]:
    model = seeded(NotANumber)
    make_trainer(_scaling()).fit(model, dealt_loader(24, 2))
    return model.states


@two_and_three_ranks
def test_a_nan_on_one_rank_makes_all_ranks_skip_the_step(ranks: RankPool, world_size: int) -> None:
    for states in ranks.run(_fit_with_a_nan, world_size):
        scales, values = [scale for scale, _ in states], [weight for _, weight in states]
        assert scales == [1024.0] + [512.0] * (len(states) - 1)
        assert torch.equal(values[0], values[1]), "skipped"
        assert not torch.equal(values[1], values[2]), "and went on"
        assert all(value.isfinite().all() for value in values)


class NoLossAtOnce(Tiny):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def _message_without_a_loss() -> str:
    with pytest.raises(RuntimeError, match="returning None") as error:
        make_trainer().fit(seeded(NoLossAtOnce), dealt_loader(24, 2))
    return str(error.value)


def test_three_ranks_without_a_loss_all_raise_lightnings_error(ranks: RankPool) -> None:
    for message in ranks.run(_message_without_a_loss, 3):
        assert "distributed training" in message
