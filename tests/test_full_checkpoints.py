"""A full checkpoint is the file that one device would have saved; any number of ranks resumes from it."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests import layouts
from tests.layouts import both_layouts
from tests.models import Tiny, TinyWithStages, dealt_loader, seeded
from tests.pooled_trainer import make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

Weights = dict[str, Tensor]
Where = tuple[str, int]  # strategy and number of ranks

NUM_SAMPLES, JOINED_BATCH = 48, 12
NUM_STEPS = NUM_SAMPLES // JOINED_BATCH  # per epoch

# Other ranks sum the same gradients in another order: fp32 rounding, which AdamW magnifies where gradients are small.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def _fit(
    strategy: str, world_size: int, *, max_epochs: int, save: Path | None = None, resume: Path | None = None,
    optimizer: str = "adamw",
) -> tuple[list[float], Weights]:  # fmt: skip
    """Losses and weights; the joined batches and their order are the same at every world size."""
    model = seeded(Tiny, optimizer=optimizer)
    trainer = make_trainer(strategy, max_epochs=max_epochs)
    trainer.fit(model, dealt_loader(NUM_SAMPLES, JOINED_BATCH // world_size), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.losses, weights(trainer)


@pytest.fixture(scope="module")
def uninterrupted(ranks: RankPool) -> tuple[list[float], Weights]:
    """Two epochs on one device."""
    return ranks.run(_fit, 1, "single", 1, max_epochs=2)[0]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Where], Path]:
    """The file that a strategy has saved after one epoch, in the layout of the running test."""
    directory = tmp_path_factory.mktemp("saved")

    def get(where: Where) -> Path:
        strategy, world_size = where
        path = directory / f"{strategy}-{world_size}-{layouts.current()}.ckpt"
        if not path.exists():
            ranks.run(_fit, world_size, strategy, world_size, max_epochs=1, save=path)
        return path

    return get


def _read(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def _assert_equal(actual: Weights, expected: Weights) -> None:
    assert actual.keys() == expected.keys()
    assert [fqn for fqn, tensor in expected.items() if not torch.equal(actual[fqn], tensor)] == []


# -- resuming ---------------------------------------------------------------------------------------------------------

OURS = [("ours", world_size) for world_size in (1, 2, 3, 4)]
SINGLE, DDP = ("single", 1), ("ddp", 2)
PAIRS = [
    *zip(OURS, [*OURS[1:], OURS[0]], strict=True),  # 1 to 2, 2 to 3, 3 to 4, 4 to 1
    (OURS[1], OURS[1]),
    (OURS[2], DDP),
    (DDP, OURS[3]),
    (OURS[3], SINGLE),
    (SINGLE, OURS[2]),
]


@pytest.mark.parametrize(("saver", "resumer"), PAIRS, ids=lambda where: f"{where[0]}{where[1]}")
def test_a_resumed_run_goes_on_as_if_uninterrupted(
    ranks: RankPool,
    saved: Callable[[Where], Path],
    uninterrupted: tuple[list[float], Weights],
    saver: Where,
    resumer: Where,
) -> None:
    strategy, world_size = resumer
    runs = ranks.run(_fit, world_size, strategy, world_size, max_epochs=2, resume=saved(saver))
    losses, expected = uninterrupted
    mean_losses = torch.tensor([run[0] for run in runs]).mean(0)
    torch.testing.assert_close(mean_losses, torch.tensor(losses[NUM_STEPS:]), **TOLERANCE)
    for fqn, tensor in expected.items():
        torch.testing.assert_close(runs[0][1][fqn], tensor, **TOLERANCE)


def test_resuming_on_as_many_ranks_is_exact(ranks: RankPool, saved: Callable[[Where], Path]) -> None:
    resumed = ranks.run(_fit, 3, "ours", 3, max_epochs=2, resume=saved(("ours", 3)))
    whole = ranks.run(_fit, 3, "ours", 3, max_epochs=2)
    _assert_equal(resumed[0][1], whole[0][1])
    assert [losses for losses, _ in resumed] == [losses[NUM_STEPS:] for losses, _ in whole]


@pytest.mark.parametrize("world_size", [2, 3])
def test_resuming_in_the_other_layout_is_exact(
    ranks: RankPool, saved: Callable[[Where], Path], world_size: int
) -> None:
    path = saved(("ours", world_size))
    with layouts.using(layouts.other()):
        resumed = ranks.run(_fit, world_size, "ours", world_size, max_epochs=2, resume=path)
    whole = ranks.run(_fit, world_size, "ours", world_size, max_epochs=2)
    _assert_equal(resumed[0][1], whole[0][1])
    assert [losses for losses, _ in resumed] == [losses[NUM_STEPS:] for losses, _ in whole]


# -- the file ---------------------------------------------------------------------------------------------------------


def _skeleton(value: Any) -> Any:
    """Everything but the numbers that training gives: the order of keys, types, shapes, dtypes and devices."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device, value.requires_grad, value.stride()
    if isinstance(value, dict):
        return [(key, _skeleton(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_skeleton(item) for item in value]
    return float if isinstance(value, float) else (type(value), value)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_file_has_the_form_of_a_single_device_checkpoint(
    ranks: RankPool, tmp_path: Path, world_size: int, optimizer: str
) -> None:
    ours, single = tmp_path / "ours.ckpt", tmp_path / "single.ckpt"
    ranks.run(_fit, world_size, "ours", world_size, max_epochs=1, save=ours, optimizer=optimizer)
    ranks.run(_fit, 1, "single", 1, max_epochs=1, save=single, optimizer=optimizer)
    assert _skeleton(_read(ours)) == _skeleton(_read(single))
    assert _read(ours)["optimizer_states"][0]["state"]


def test_the_file_holds_what_a_single_device_would_have_trained(saved: Callable[[Where], Path]) -> None:
    ours, single = _read(saved(("ours", 3))), _read(saved(SINGLE))
    for fqn, tensor in single["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][fqn], tensor, **TOLERANCE)
    for index, state in single["optimizer_states"][0]["state"].items():
        for name, tensor in state.items():
            torch.testing.assert_close(ours["optimizer_states"][0]["state"][index][name], tensor, **TOLERANCE)


def test_load_from_checkpoint_opens_the_file(saved: Callable[[Where], Path]) -> None:
    path = saved(("ours", 3))
    model = Tiny.load_from_checkpoint(path)
    assert model.hparams["optimizer"] == "adamw"
    _assert_equal(dict(model.state_dict()), _read(path)["state_dict"])


def _fit_with_default_checkpoints(directory: Path) -> tuple[str, Weights]:
    trainer = make_trainer(enable_checkpointing=True, default_root_dir=directory)
    trainer.fit(seeded(), dealt_loader(NUM_SAMPLES, 4))
    return trainer.checkpoint_callback.best_model_path, weights(trainer)


def test_the_default_model_checkpoint_saves_the_trained_weights(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(_fit_with_default_checkpoints, 2, tmp_path)
    paths = list(tmp_path.rglob("*.ckpt"))
    assert [path for path, _ in results] == [str(path) for path in paths] * 2
    _assert_equal(_read(paths[0])["state_dict"], results[0][1])


def _keep_the_best(directory: Path) -> tuple[list[str], float, float]:
    """Names of the files left, and the test losses of the best one by itself and with the weights in place."""
    checkpoint = ModelCheckpoint(dirpath=directory, monitor="val_loss", save_top_k=2, save_last=True)
    trainer = make_trainer(max_epochs=3, callbacks=[checkpoint], enable_checkpointing=True)
    model = seeded(TinyWithStages)
    trainer.fit(model, dealt_loader(NUM_SAMPLES, 4), dealt_loader(8, 2))
    [tested] = trainer.test(model, dealt_loader(8, 2), ckpt_path="best", verbose=False)
    return sorted(path.name for path in directory.iterdir()), tested["test_loss"], float(checkpoint.best_model_score)


def test_top_k_checkpoints_are_kept_and_the_best_is_tested(ranks: RankPool, tmp_path: Path) -> None:
    for names, tested, best in ranks.run(_keep_the_best, 2, tmp_path):
        assert len(names) == 3
        assert "last.ckpt" in names
        assert tested == best  # the same batches on the same weights


def _save_after_test(path: Path) -> Weights:
    trainer = make_trainer()
    model = seeded(TinyWithStages)
    trainer.fit(model, dealt_loader(NUM_SAMPLES, 4), dealt_loader(8, 2))
    trainer.test(model, dealt_loader(8, 2), verbose=False)
    trainer.save_checkpoint(path)
    return weights(trainer)


def test_a_checkpoint_can_be_saved_after_test(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(_save_after_test, 2, tmp_path / "model.ckpt")[0]
    _assert_equal(_read(tmp_path / "model.ckpt")["state_dict"], expected)


# -- hooks ------------------------------------------------------------------------------------------------------------


class Hooked(TinyWithStages):
    """Reads and edits its checkpoints."""

    loaded_keys: tuple[str, ...] = ()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = sorted(checkpoint["state_dict"])[:1]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded_keys = tuple(checkpoint["state_dict"])
        checkpoint["state_dict"]["scale"] = torch.full((1,), 3.0)


def _save_and_test(cls: type[Tiny], path: Path) -> tuple[tuple[str, ...], Weights, Weights]:
    """What `on_load_checkpoint` saw, the weights as saved, and those that a second module was tested with."""
    trainer = make_trainer()
    trainer.fit(seeded(cls), dealt_loader(NUM_SAMPLES, 4), dealt_loader(8, 2))
    trainer.save_checkpoint(path)
    trained = weights(trainer)
    model = cls()
    trainer = make_trainer()
    trainer.test(model, dealt_loader(8, 2), ckpt_path=path, verbose=False)
    return getattr(model, "loaded_keys", ()), trained, weights(trainer)


def test_on_load_checkpoint_sees_and_edits_the_state_dict(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(_save_and_test, 2, Hooked, tmp_path / "model.ckpt")
    _, trained, tested = results[0]
    assert [keys for keys, _, _ in results] == [tuple(trained), tuple(trained)]
    _assert_equal(tested, {**trained, "scale": torch.full((1,), 3.0)})


def test_on_save_checkpoint_adds_to_the_file(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save_and_test, 2, Hooked, tmp_path / "model.ckpt")
    assert _read(tmp_path / "model.ckpt")["mine"] == ["blocks.0.down.bias"]


class SavesNormsOnly(TinyWithStages):
    """As adapters do: what is not trained is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        everything = super().state_dict(*args, **kwargs)
        return OrderedDict((fqn, value) for fqn, value in everything.items() if ".norm." in fqn)


def test_a_module_that_filters_its_state_dict_saves_and_loads_the_rest(ranks: RankPool, tmp_path: Path) -> None:
    _, trained, tested = ranks.run(_save_and_test, 2, SavesNormsOnly, tmp_path / "model.ckpt")[0]
    assert sorted(trained) == sorted(f"blocks.{i}.norm.{name}" for i in range(3) for name in ("weight", "bias"))
    _assert_equal(_read(tmp_path / "model.ckpt")["state_dict"], trained)
    _assert_equal(tested, trained)


def _test_with(cls: type[Tiny], path: Path) -> tuple[float, Weights]:
    trainer = make_trainer()
    [tested] = trainer.test(cls(), dealt_loader(8, 2), ckpt_path=path, verbose=False)
    return tested["test_loss"], weights(trainer)


def test_a_module_that_filters_its_state_dict_loads_a_whole_one(
    ranks: RankPool, saved: Callable[[Where], Path]
) -> None:
    path = saved(("ours", 2))
    filtered, plain = ranks.run(_test_with, 2, SavesNormsOnly, path), ranks.run(_test_with, 2, TinyWithStages, path)
    assert [loss for loss, _ in filtered] == [loss for loss, _ in plain]


# -- mistakes ---------------------------------------------------------------------------------------------------------


class Lenient(TinyWithStages):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False


class WithTwoOptimizers(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.blocks.parameters()), torch.optim.AdamW(self.head.parameters())]


class WithFewerParams(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.blocks.parameters())


def _resume_error(cls: type[Tiny], path: Path, **kwargs: Any) -> str:
    trainer = make_trainer(max_epochs=2)
    with pytest.raises((RuntimeError, ValueError, KeyError)) as error:
        trainer.fit(seeded(cls, **kwargs), dealt_loader(NUM_SAMPLES, 4), ckpt_path=path)
    return str(error.value)


def _edited(path: Path, to: Path, edit: Callable[[Weights], Any]) -> Path:
    checkpoint = _read(path)
    edit(checkpoint["state_dict"])
    torch.save(checkpoint, to)
    return to


EDITS: dict[str, tuple[Callable[[Weights], Any], list[str]]] = {
    "a_missing_key": (lambda state: state.pop("blocks.1.up.weight"), ["Missing key", '"blocks.1.up.weight"']),
    "an_unexpected_key": (lambda state: state.update(tail=torch.ones(2)), ["Unexpected key", '"tail"']),
    "another_shape": (
        lambda state: state.update({"head.weight": torch.ones(3, 5)}),
        ["head.weight", "[3, 5]", "[2, 5]"],
    ),
    "another_number_of_dimensions": (
        lambda state: state.update({"head.weight": torch.ones(10)}),
        ["head.weight", "[10]", "[2, 5]"],
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_state_dict_that_does_not_fit_is_an_error_that_names_the_key(
    ranks: RankPool, saved: Callable[[Where], Path], tmp_path: Path, name: str
) -> None:
    edit, expected = EDITS[name]
    path = _edited(saved(("ours", 2)), tmp_path / "edited.ckpt", edit)
    for message in ranks.run(_resume_error, 2, Tiny, path, optimizer="adamw"):
        assert [text for text in expected if text not in message] == [], message


def test_without_strict_loading_the_keys_that_fit_are_loaded(
    ranks: RankPool, saved: Callable[[Where], Path], tmp_path: Path
) -> None:
    def edit(state: Weights) -> None:
        state["tail"] = state.pop("head.bias")

    path = _edited(saved(("ours", 2)), tmp_path / "edited.ckpt", edit)
    loaded = ranks.run(_test_with, 2, Lenient, path)[0][1]
    expected = _read(path)["state_dict"]
    assert [fqn for fqn in loaded if fqn != "head.bias" and not torch.equal(loaded[fqn], expected[fqn])] == []


def _save_weights_only(path: Path) -> None:
    trainer = make_trainer()
    trainer.fit(seeded(), dealt_loader(NUM_SAMPLES, 4))
    trainer.save_checkpoint(path, weights_only=True)


def test_resuming_from_weights_only_says_so(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    ranks.run(_save_weights_only, 2, path)
    assert "optimizer_states" not in _read(path)
    for message in ranks.run(_resume_error, 2, Tiny, path):
        assert "restore optimizer state but checkpoint contains only the model" in message
        assert "save_weights_only" in message


def test_a_checkpoint_of_another_number_of_optimizers_is_an_error(
    ranks: RankPool, saved: Callable[[Where], Path]
) -> None:
    for message in ranks.run(_resume_error, 2, WithTwoOptimizers, saved(("ours", 2))):
        assert "Expected a checkpoint of 2 optimizers, got one of 1" in message


def test_a_checkpoint_of_an_optimizer_over_other_parameters_is_an_error(
    ranks: RankPool, saved: Callable[[Where], Path]
) -> None:
    for message in ranks.run(_resume_error, 2, WithFewerParams, saved(("ours", 2))):
        assert "optimizer" in message
        assert "parameter" in message
