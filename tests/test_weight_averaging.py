"""Lightning's weight averaging over shards: averages of the same values, without communication, in the same files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import Tensor

from fsdp_strategy.engine.sharded_tensor import ShardedTensor
from tests.engine_cases import assert_close
from tests.layouts import both_layouts
from tests.models import Tiny, TinyWithStages, dealt_loader, seeded
from tests.pooled_trainer import make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

NUM_SAMPLES, JOINED_BATCH = 24, 12
TOLERANCE = 1e-5


def _callback(kind: str) -> WeightAveraging:
    if kind == "ema":
        return EMAWeightAveraging(decay=0.5)
    if kind == "foreach":
        return WeightAveraging(multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    return WeightAveraging()


def _fit(
    strategy: str, world_size: int, kind: str, *, max_epochs: int = 2, save: Path | None = None,
    resume: Path | None = None,
) -> tuple[dict[str, Tensor], list[float]]:  # fmt: skip
    """The averaged weights, which the module has after training, and the validation losses, which are the averages'."""
    losses: list[float] = []

    class Listening(TinyWithStages):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            losses.append(float(self.loss(batch)))

    trainer = make_trainer(strategy, max_epochs=max_epochs, callbacks=[_callback(kind)])
    train, val = (dealt_loader(NUM_SAMPLES, JOINED_BATCH // world_size) for _ in range(2))
    trainer.fit(seeded(Listening), train, val, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return weights(trainer), losses


@pytest.mark.parametrize("kind", ["mean", "ema", "foreach"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_averages_are_those_of_one_device(ranks: RankPool, kind: str, world_size: int) -> None:
    expected, losses = ranks.run(_fit, 1, "single", 1, kind)[0]
    answers = ranks.run(_fit, world_size, "ours", world_size, kind)
    assert_close(answers[0][0], expected, TOLERANCE)
    joined = torch.tensor([own for _, own in answers]).mean(0)
    torch.testing.assert_close(joined, torch.tensor(losses), atol=TOLERANCE, rtol=TOLERANCE)


class Probe(EMAWeightAveraging):
    """Looks at what the average holds and what updating and swapping sends."""

    def __init__(self) -> None:
        super().__init__(decay=0.5)
        self.held = self.whole = self.messages = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        assert self._average_model is not None
        params = list(self._average_model.module.parameters())
        assert all(isinstance(param, ShardedTensor) for param in params)
        self.held = sum(param.to_local().numel() for param in params)
        self.whole = sum(param.numel() for param in params)
        with torch.profiler.profile() as profile:
            super().on_train_batch_end(trainer, pl_module, *args)
            self._swap_models(pl_module)
            self._swap_models(pl_module)
        self.messages += sum(event.name.startswith("gloo:") for event in profile.events())


def _probe() -> tuple[int, int, int]:
    probe = Probe()
    make_trainer(callbacks=[probe]).fit(seeded(Tiny), dealt_loader(NUM_SAMPLES, 2))
    return probe.held, probe.whole, probe.messages


def test_averages_are_sharded_and_send_nothing(ranks: RankPool) -> None:
    answers = ranks.run(_probe, 3)
    assert sum(held for held, *_ in answers) == answers[0][1]
    assert [messages for *_, messages in answers] == [0, 0, 0]


def _checkpoint_during_fit(strategy: str, world_size: int, path: Path) -> dict[str, Any]:
    """What a checkpoint in the middle of a fit holds, on rank 0."""

    class Saving(Tiny):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(path)

    trainer = make_trainer(strategy, callbacks=[_callback("ema")])
    trainer.fit(seeded(Saving), dealt_loader(NUM_SAMPLES, JOINED_BATCH // world_size))
    return torch.load(path, weights_only=True) if trainer.global_rank == 0 else {}


def test_the_file_holds_averages_and_weights_as_from_one_device(ranks: RankPool, tmp_path: Path) -> None:
    single = ranks.run(_checkpoint_during_fit, 1, "single", 1, tmp_path / "single.ckpt")[0]
    ours = ranks.run(_checkpoint_during_fit, 2, "ours", 2, tmp_path / "ours.ckpt")[0]
    assert ours.keys() == single.keys()
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert_close(ours[key], single[key], TOLERANCE)


@pytest.mark.parametrize(("saver", "resumer"), [(("ours", 2), ("ours", 3)), (("single", 1), ("ours", 2))])
def test_a_resumed_run_goes_on_averaging(
    ranks: RankPool, tmp_path: Path, saver: tuple[str, int], resumer: tuple[str, int]
) -> None:
    path = tmp_path / "saved.ckpt"
    expected, _ = ranks.run(_resumable, 1, "single", 1, None, None)[0]
    ranks.run(_resumable, saver[1], *saver, path, None)
    resumed, _ = ranks.run(_resumable, resumer[1], *resumer, None, path)[0]
    assert_close(resumed, expected, TOLERANCE)


def _resumable(strategy: str, world_size: int, save: Path | None, resume: Path | None) -> tuple[dict[str, Tensor], int]:
    """Two epochs of averaging, saved after the first one or resumed from there."""

    class Saving(Tiny):
        def on_train_epoch_end(self) -> None:
            if save is not None and self.current_epoch == 0:
                self.trainer.save_checkpoint(save)

    trainer = make_trainer(strategy, callbacks=[_callback("ema")], max_epochs=1 if save is not None else 2)
    trainer.fit(seeded(Saving), dealt_loader(NUM_SAMPLES, JOINED_BATCH // world_size), ckpt_path=resume)
    return weights(trainer), trainer.global_step
