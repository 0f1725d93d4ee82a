"""Precisions through the Trainer: the bits of `ddp` where both can, wide sums, and one loss scale for all ranks."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fsdp_strategy import FullyShardedStrategy
from fsdp_strategy.engine import EngineConfig, FullyShardedEngine, ShardMesh
from fsdp_strategy.precision import MixedPrecision, ShardedGradScaler, shard_precision
from tests.layouts import both_layouts
from tests.pooled_trainer import make_strategy, make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + self.attention(x, x, x)[0]


class _Mixed(pl.LightningModule):
    """Convolution, batch norm, linear, attention and layer norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(2))
        self.losses: list[float] = []
        self.scales: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.norm(self.conv(x)).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch[0]).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _data(dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    samples = torch.randn(32, 3, 6, generator=torch.Generator().manual_seed(3), dtype=dtype)
    return DataLoader(TensorDataset(samples), 4)


def _fit(strategy: str, precision: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = _Mixed()
    trainer = make_trainer(strategy, precision=precision)
    trainer.fit(module, _data())
    return module.losses, weights(trainer) if strategy == "ours" else module.state_dict()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_two_ranks_train_the_bits_of_ddp(ranks: RankPool, precision: str) -> None:
    (losses, ours), (other_losses, _) = ranks.run(_fit, 2, "ours", precision)
    (ddp_losses, ddp), (other_ddp_losses, _) = ranks.run(_fit, 2, "ddp", precision)
    assert (losses, other_losses) == (ddp_losses, other_ddp_losses)
    assert ours.keys() == ddp.keys()
    for fqn, tensor in ddp.items():
        assert ours[fqn].dtype == tensor.dtype
        assert torch.equal(ours[fqn], tensor), fqn


def _sum_in(native: bool, reduce_dtype: torch.dtype | None) -> float:
    """One weight whose gradient is 1 on rank 0 and 2^-9 on the others: in bf16, 1 + 2^-9 is 1."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).to(torch.bfloat16)
    engine = FullyShardedEngine(
        model, ShardMesh(torch.device("cpu"), native=native), EngineConfig(reduce_dtype=reduce_dtype)
    )
    rank = torch.distributed.get_rank()
    model(torch.tensor([[1.0 if rank == 0 else 2.0**-9]], dtype=torch.bfloat16)).sum().backward()
    grad = next(engine.params).sharded.grad
    assert grad is not None
    return grad.full_tensor().item()


@pytest.mark.parametrize("native", [False, True])
def test_low_precision_gradients_are_summed_in_float32(ranks: RankPool, native: bool) -> None:
    # (1 + 3 * 2^-9) / 4 rounds up to the next bf16 value; summed in bf16 nothing would be left of the small ones.
    exact = torch.tensor((1 + 3 * 2.0**-9) / 4).bfloat16().item()
    assert ranks.run(_sum_in, 4, native, None) == [exact] * 4
    assert exact > 0.25


def test_summing_in_bfloat16_loses_what_float32_keeps(ranks: RankPool) -> None:
    assert ranks.run(_sum_in, 4, False, torch.bfloat16) == [0.25] * 4


class _Double(_Mixed):
    """No batch norm: the joined batch must be the same function of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # AdamW would turn the rounding of gradients that are zero (of the keys' bias) into whole steps.
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _fit_double(strategy: str, batch_size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = _Double()
    trainer = make_trainer(strategy, precision="64-true")
    samples = torch.randn(24, 3, 6, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(samples)
    sampler = DistributedSampler(dataset, shuffle=False)  # the batches of one step join to consecutive samples
    trainer.fit(module, DataLoader(dataset, batch_size, sampler=sampler))
    return weights(trainer) if strategy == "ours" else module.state_dict()


@pytest.mark.parametrize("world_size", [2, 3])
def test_double_precision_equals_one_process(ranks: RankPool, world_size: int) -> None:
    ours = ranks.run(_fit_double, world_size, "ours", 12 // world_size)[0]
    single = ranks.run(_fit_double, 1, "single", 12)[0]
    for fqn, tensor in single.items():
        assert tensor.dtype == torch.float64
        # Only the order of sums differs.
        torch.testing.assert_close(ours[fqn], tensor, rtol=1e-12, atol=1e-12)


class _Overflows(_Mixed):
    """On one rank the loss of one step overflows fp16."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 and self.global_rank == 1 else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _fit_overflowing() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    module, before = _Overflows(), {}
    plugin = MixedPrecision("16-mixed", "cpu", ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=1000))
    trainer = make_trainer(make_strategy("ours", precision_plugin=plugin))

    class Snapshots(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            before[args[-1]] = weights(trainer)

    trainer.callbacks.append(Snapshots())
    trainer.fit(module, _data())
    return module.scales, before.get(0, {}), before.get(1, {}), before.get(3, {})


def test_an_overflow_on_one_rank_makes_all_ranks_skip_and_training_goes_on(ranks: RankPool) -> None:
    results = ranks.run(_fit_overflowing, 2)
    assert [scales for scales, *_ in results] == [[1024.0, 512.0, 512.0, 512.0]] * 2
    _, first, second, last = results[0]
    params = [fqn for fqn in first if "norm.running" not in fqn and "num_batches" not in fqn]
    assert all(torch.equal(first[fqn], second[fqn]) for fqn in params), "the step was skipped"
    assert not all(torch.equal(second[fqn], last[fqn]) for fqn in params), "training went on"
    assert all(tensor.isfinite().all() for tensor in last.values())


def _gathered_dtypes() -> dict[torch.dtype, int]:
    module = _Mixed(width=256)
    trainer = make_trainer("ours", precision="bf16-mixed", max_steps=1)
    trainer.fit(module, _data())
    numels: dict[torch.dtype, int] = {}
    for unit in trainer.strategy.engine.units:
        for span in unit.spans:
            assert span.shard.dtype == torch.float32
            numels[span.param_dtype] = numels.get(span.param_dtype, 0) + span.layout.numel * span.param_dtype.itemsize
    return numels


def test_mixed_precision_gathers_matrices_in_bfloat16_and_little_else(ranks: RankPool) -> None:
    nbytes = ranks.run(_gathered_dtypes, 2)[0]
    assert set(nbytes) == {torch.bfloat16, torch.float32}
    assert nbytes[torch.float32] < 0.01 * nbytes[torch.bfloat16]


def test_another_precision_is_refused() -> None:
    plugin = Precision()
    plugin.precision = "16-true"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"'64-true', got '16-true'"):
        FullyShardedStrategy(precision_plugin=plugin)


def test_a_plugin_of_the_users_own_is_refused_with_what_to_derive_from() -> None:
    class Own(Precision):
        pass

    with pytest.raises(TypeError, match=r"Own.*ShardedPrecision"):
        shard_precision(Own())
