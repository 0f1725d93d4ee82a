"""A checkpoint on an exception: written when all ranks fail together, skipped in time when one fails alone."""

import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from tests.layouts import both_layouts
from tests.models import Tiny, loader, seeded
from tests.pooled_trainer import make_trainer
from tests.rank_pool import RankPool

pytestmark = both_layouts

FAILING_STEP = 2


class _AllFail(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == FAILING_STEP:
            raise ArithmeticError("every rank fails")
        return super().training_step(batch, batch_idx)


def _fit_until_all_fail(directory: Path) -> None:
    trainer = make_trainer("ours", callbacks=[OnExceptionCheckpoint(directory, "failed")], enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning takes the callback for one that resumes, and says so
        with pytest.raises(ArithmeticError, match="every rank fails"):
            trainer.fit(seeded(_AllFail), loader(16, 2))


def _fit_steps(num_steps: int) -> dict[str, Tensor]:
    trainer = make_trainer("ours", limit_train_batches=num_steps)
    trainer.fit(seeded(), loader(16, 2))
    return trainer.strategy.lightning_module_state_dict()


def test_ranks_that_fail_together_write_the_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_fit_until_all_fail, 2, tmp_path)
    saved = torch.load(tmp_path / "failed.ckpt", weights_only=True)
    assert saved["global_step"] == FAILING_STEP
    expected = ranks.run(_fit_steps, 2, FAILING_STEP)[0]
    assert all(torch.equal(saved["state_dict"][fqn], tensor) for fqn, tensor in expected.items())


class _OneFails(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == FAILING_STEP and self.global_rank == 1:
            raise ArithmeticError("one rank fails")
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.usefixtures("trainer_process")
@pytest.mark.filterwarnings("ignore")  # Lightning takes the callback for one that resumes, and says so
def test_the_error_of_a_rank_that_fails_alone_is_seen_in_seconds(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        strategy="fully_sharded_fork", accelerator="cpu", devices=2, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[OnExceptionCheckpoint(tmp_path, "failed")],
    )  # fmt: skip
    start = time.monotonic()
    with pytest.raises(Exception, match="one rank fails"):
        trainer.fit(seeded(_OneFails), loader(16, 2))
    assert time.monotonic() - start < 20  # the failing rank waits 5 s for the other to save with it
    assert not (tmp_path / "failed.ckpt").exists()
