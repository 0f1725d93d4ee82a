"""One rank on one device: fits, checkpoints, the order of events, and no host synchronisation within a step."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp_strategy import FullyShardedStrategy
from fsdp_strategy.engine import EngineConfig, FullyShardedEngine, LocalStep, ShardMesh
from tests.rank_pool import RankPool

pytestmark = pytest.mark.gpu


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 128), nn.Linear(128, 16)
        self.blocks = nn.ModuleList(_Block(128) for _ in range(3))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self(batch[0]) - batch[0]).float().pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit(strategy: Any, precision: str, directory: Path, **kwargs: Any) -> _Net:
    torch.manual_seed(0)
    module, data = _Net(), TensorDataset(torch.randn(64, 16))
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = L.Trainer(
        accelerator="cuda", devices=1, strategy=strategy, precision=precision, max_epochs=2,
        default_root_dir=directory, enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 8), **kwargs)
    trainer.save_checkpoint(directory / "last.ckpt")
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fit_follows_the_unsharded_one_and_its_checkpoint_opens(
    precision: str, tmp_path: Path, trainer_process: None
) -> None:
    plain = _fit("auto", precision, tmp_path / "plain")
    sharded = _fit(FullyShardedStrategy(), precision, tmp_path / "sharded")
    torch.distributed.destroy_process_group()
    # The same kernels on the same numbers, except that a bf16 weight is cast once instead of at every use.
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-5 if precision == "32-true" else 1e-2)
    saved = torch.load(tmp_path / "sharded" / "last.ckpt", weights_only=True)["state_dict"]
    assert {key: value.shape for key, value in saved.items()} == {k: v.shape for k, v in plain.state_dict().items()}
    assert not any(value.is_cuda for value in saved.values())


def _steps_on_device() -> tuple[list[tuple[str, str]], int]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    module = _Net()
    engine = FullyShardedEngine(module, ShardMesh(device), EngineConfig())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    LocalStep(optimizer, engine.params)
    batch = torch.randn(8, 16, device=device)

    def step() -> None:
        module(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with engine.record() as recorder:
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return [(event.kind, event.unit) for event in recorder.events], len(engine.units)


def test_a_step_gathers_ahead_and_never_waits_for_the_device(ranks: RankPool) -> None:
    events, num_units = ranks.run(_steps_on_device, 1)[0]  # a synchronisation would have raised
    assert events.index(("all_gather", "blocks.1")) < events.index(("post_forward", "blocks.0"))
    assert sum(kind == "all_gather" for kind, _ in events) == 2 * (num_units - 1) + 1
    assert sum(kind == "reduce_scatter" for kind, _ in events) == num_units
