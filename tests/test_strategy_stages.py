"""Fit, validate, test and predict follow each other in any order, on one module or several, whatever the batches."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn

from tests import layouts
from tests.layouts import both_layouts
from tests.models import Batch, Block, Tiny, TinyWithStages, dealt_loader, loader, samples, seeded
from tests.pooled_trainer import make_strategy, make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

Weights = dict[str, Tensor]


def _assert_equal(actual: Weights, expected: Weights) -> None:
    assert actual.keys() == expected.keys()
    assert [fqn for fqn, tensor in expected.items() if not torch.equal(actual[fqn], tensor)] == []


def _fit_after(stages: list[str], strategy: str = "ours") -> tuple[Weights, list[float]]:
    """Fit one epoch after other stages, all with one Trainer."""
    model = seeded(TinyWithStages)
    trainer = make_trainer(strategy)
    for stage in stages:
        make_loader = loader if stage == "predict" else dealt_loader
        getattr(trainer, stage)(model, make_loader(20, 3))
    trainer.fit(model, dealt_loader(24, 4), dealt_loader(8, 2))
    return weights(trainer), model.losses


@pytest.mark.parametrize("stages", [["validate"], ["test"], ["predict"], ["validate", "test", "predict"]], ids="-".join)
def test_stages_before_fit_change_nothing(ranks: RankPool, stages: list[str]) -> None:
    [after, losses], *_ = ranks.run(_fit_after, 2, stages)
    [alone, expected], *_ = ranks.run(_fit_after, 2, [])
    _assert_equal(after, alone)
    assert losses == expected


def _run_all_stages(strategy: str) -> tuple[Weights, list[float], list[float]]:
    model = seeded(TinyWithStages)
    trainer = make_trainer(strategy)
    [validated] = trainer.validate(model, dealt_loader(20, 3), verbose=False)
    trainer.fit(model, dealt_loader(24, 4), dealt_loader(8, 2))
    [tested] = trainer.test(model, dealt_loader(20, 3), verbose=False)
    trainer.predict(model, loader(7, 2))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, dealt_loader(24, 4), dealt_loader(8, 2))
    return weights(trainer), model.losses, [validated["val_loss"], tested["test_loss"]]


def test_all_stages_on_one_trainer_equal_those_of_ddp(ranks: RankPool) -> None:
    ours, ddp = ranks.run(_run_all_stages, 2, "ours"), ranks.run(_run_all_stages, 2, "ddp")
    _assert_equal(ours[0][0], ddp[0][0])
    assert [run[1:] for run in ours] == [run[1:] for run in ddp]
    assert len(ours[0][1]) == 6


def _fit_with_two_trainers(strategy: str) -> tuple[Weights, list[float]]:
    model = seeded()
    make_trainer(strategy).fit(model, dealt_loader(24, 4))
    trainer = make_trainer(strategy)
    trainer.fit(model, dealt_loader(24, 4))
    return weights(trainer), model.losses


def test_a_second_trainer_goes_on_with_the_weights_of_the_first(ranks: RankPool) -> None:
    ours, ddp = ranks.run(_fit_with_two_trainers, 2, "ours"), ranks.run(_fit_with_two_trainers, 2, "ddp")
    _assert_equal(ours[0][0], ddp[0][0])
    assert [losses for _, losses in ours] == [losses for _, losses in ddp]


def _test_with_a_second_trainer(strategy: str) -> float:
    model = seeded(TinyWithStages)
    make_trainer(strategy).fit(model, dealt_loader(24, 4), dealt_loader(8, 2))
    [tested] = make_trainer(strategy).test(model, dealt_loader(20, 3), verbose=False)
    return tested["test_loss"]


def test_a_second_trainer_tests_the_weights_of_the_first(ranks: RankPool) -> None:
    ours, ddp = ranks.run(_test_with_a_second_trainer, 2, "ours"), ranks.run(_test_with_a_second_trainer, 2, "ddp")
    assert ours == ddp


def _fit_two_fresh_modules(strategy: str) -> list[Weights]:
    trained = []
    for _ in range(2):
        trainer = make_trainer(strategy)
        trainer.fit(seeded(), dealt_loader(24, 4))
        trained.append(weights(trainer))
    return trained


def test_two_fits_in_one_process_are_independent(ranks: RankPool) -> None:
    first, second = ranks.run(_fit_two_fresh_modules, 2, "ours")[0]
    _assert_equal(first, second)


def _fit_another_module(strategy: str) -> tuple[Weights, Any]:
    trainer = make_trainer(strategy)
    trainer.fit(seeded(), dealt_loader(24, 4))
    first_engine = getattr(trainer.strategy, "engine", None)
    other = seeded(width=7)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(other, dealt_loader(24, 4))
    is_new = first_engine is not getattr(trainer.strategy, "engine", None)
    return weights(trainer), is_new


def test_another_module_on_the_same_strategy_is_sharded_anew(ranks: RankPool) -> None:
    ours, ddp = ranks.run(_fit_another_module, 2, "ours"), ranks.run(_fit_another_module, 2, "ddp")
    _assert_equal(ours[0][0], ddp[0][0])
    assert [is_new for _, is_new in ours] == [True, True]


# -- uneven batches ---------------------------------------------------------------------------------------------------


class Meeting(pl.Callback):
    """A user's collective at the end of the epoch."""

    def __init__(self) -> None:
        self.total = 0

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.total = int(trainer.strategy.reduce(torch.tensor(dist.get_rank() + 1), reduce_op="sum"))


def _predict(num_samples: int, batch_size: int) -> tuple[list[Tensor], int]:
    meeting = Meeting()
    trainer = make_trainer(callbacks=[meeting])
    predictions = trainer.predict(seeded(TinyWithStages), loader(num_samples, batch_size))
    return predictions, meeting.total


@pytest.mark.parametrize(("world_size", "num_samples", "batch_size"), [(2, 5, 1), (2, 9, 4), (3, 8, 2), (4, 5, 1)])
def test_prediction_returns_every_sample_once(
    ranks: RankPool, world_size: int, num_samples: int, batch_size: int
) -> None:
    results = ranks.run(_predict, world_size, num_samples, batch_size)
    with torch.no_grad():
        expected = seeded()(samples(num_samples).tensors[0])
    for rank, (predictions, total) in enumerate(results):
        # The same arithmetic on batches of another size: fp32 rounding.
        torch.testing.assert_close(torch.cat(predictions), expected[rank::world_size], rtol=1e-5, atol=1e-6)
        assert total == world_size * (world_size + 1) // 2


def _predict_twice_then_fit() -> Weights:
    model = seeded(TinyWithStages)
    trainer = make_trainer()
    for _ in range(2):
        trainer.predict(model, loader(5, 1))
    trainer.fit(model, dealt_loader(24, 4), dealt_loader(8, 2))
    return weights(trainer)


def test_uneven_prediction_leaves_the_ranks_in_step(ranks: RankPool) -> None:
    trained = ranks.run(_predict_twice_then_fit, 3)[0]
    _assert_equal(trained, ranks.run(_fit_after, 3, [])[0][0])


def _fit_samples(strategy: str, num_samples: int, batch_size: int) -> tuple[Weights, list[float]]:
    model = seeded()
    trainer = make_trainer(strategy, max_epochs=2)
    trainer.fit(model, loader(num_samples, batch_size))
    return weights(trainer), model.losses


@pytest.mark.parametrize("num_samples", [1, 3])
def test_fewer_samples_than_ranks_times_batch_train_as_ddp(ranks: RankPool, num_samples: int) -> None:
    ours, ddp = ranks.run(_fit_samples, 2, "ours", num_samples, 4), ranks.run(_fit_samples, 2, "ddp", num_samples, 4)
    _assert_equal(ours[0][0], ddp[0][0])
    assert [losses for _, losses in ours] == [losses for _, losses in ddp]


# -- ranks that do not do the same ------------------------------------------------------------------------------------


class NoLoss(Tiny):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def _message_without_a_loss() -> str:
    with pytest.raises(RuntimeError) as error:
        make_trainer().fit(seeded(NoLoss), dealt_loader(24, 4))
    return str(error.value)


def test_a_step_without_a_loss_raises_lightnings_error_on_every_rank(ranks: RankPool) -> None:
    for message in ranks.run(_message_without_a_loss, 2):
        assert "returning None in distributed training is not supported" in message


class LayerDrop(Tiny):
    """Every rank leaves out another block in every step."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x + self.shift)
        dropped = (self.global_step + dist.get_rank()) % len(self.blocks)
        for index, block in enumerate(self.blocks):
            x = x if index == dropped else block(x)
        return self.head(x)


def _fit_layer_drop(strategy: str) -> tuple[Weights, list[float]]:
    model = seeded(LayerDrop)
    chosen = make_strategy("ddp", find_unused_parameters=True) if strategy == "ddp" else strategy
    trainer = make_trainer(chosen)
    trainer.fit(model, dealt_loader(24, 2))
    return weights(trainer), model.losses


def test_ranks_that_leave_out_different_blocks_train_as_ddp(ranks: RankPool) -> None:
    ours, ddp = ranks.run(_fit_layer_drop, 2, "ours"), ranks.run(_fit_layer_drop, 2, "ddp")
    _assert_equal(ours[0][0], ddp[0][0])
    assert [losses for _, losses in ours] == [losses for _, losses in ddp]


class FailsOnce(TinyWithStages):
    """Raises in the middle of a forward of the second step, on every rank."""

    has_failed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.global_step == 1 and not self.has_failed:
            self.has_failed = True
            self.blocks[0](self.stem(x))
            raise ZeroDivisionError("once")
        return super().forward(x)


def _fail_then_go_on() -> tuple[Weights, float, float]:
    model = seeded(FailsOnce)
    trainer = make_trainer()
    with pytest.raises(ZeroDivisionError, match="once"):
        trainer.fit(model, dealt_loader(24, 4), dealt_loader(8, 2))
    after_one_step = weights(trainer)
    [first] = trainer.test(model, dealt_loader(20, 3), verbose=False)
    trainer.fit(model, dealt_loader(24, 4), dealt_loader(8, 2))
    [second] = trainer.test(model, dealt_loader(20, 3), verbose=False)
    return after_one_step, first["test_loss"], second["test_loss"]


def _fit_one_step() -> Weights:
    trainer = make_trainer(max_steps=1)
    trainer.fit(seeded(TinyWithStages), dealt_loader(24, 4), dealt_loader(8, 2))
    return weights(trainer)


def test_after_an_exception_on_every_rank_training_can_go_on(ranks: RankPool) -> None:
    with ranks.timeout(15):
        after_one_step, first, second = ranks.run(_fail_then_go_on, 2)[0]
    _assert_equal(after_one_step, ranks.run(_fit_one_step, 2)[0])
    assert second < first


# -- layers built late, calls from hooks ------------------------------------------------------------------------------


class BuiltLate(TinyWithStages):
    """Its blocks come from `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        if not len(self.blocks):
            torch.manual_seed(11)
            self.blocks.extend(Block() for _ in range(2))


def _fit_late(strategy: str) -> tuple[Weights, list[str]]:
    trainer = make_trainer(strategy)
    model = seeded(BuiltLate)
    trainer.fit(model, dealt_loader(24, 4), dealt_loader(8, 2))
    trainer.test(model, dealt_loader(8, 2), verbose=False)
    units = [unit.fqn for unit in trainer.strategy.engine.units] if strategy == "ours" else []
    return weights(trainer), units


def test_layers_built_in_configure_model_are_sharded_and_trained(ranks: RankPool) -> None:
    ours, ddp = ranks.run(_fit_late, 2, "ours"), ranks.run(_fit_late, 2, "ddp")
    _assert_equal(ours[0][0], ddp[0][0])
    assert ours[0][1] == ["", "blocks.0", "blocks.1"]


HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_fit_end",
]


class Caller(pl.Callback):
    """Calls the module in some hooks, with gradients enabled or not as the Trainer has it there."""

    def __init__(self, hooks: list[str]) -> None:
        self.outputs: list[tuple[str, Tensor]] = []
        self._hooks = set(hooks)

    def call(self, hook: str, pl_module: pl.LightningModule) -> None:
        if hook in self._hooks:
            self.outputs.append((hook, pl_module(samples(3).tensors[0]).detach().clone()))


def _add_hook(name: str) -> None:
    setattr(Caller, name, lambda self, trainer, pl_module, *args, **kwargs: self.call(name, pl_module))


for _name in HOOKS:
    _add_hook(_name)


def _fit_calling(strategy: str, hooks: list[str]) -> tuple[Weights, list[tuple[str, Tensor]]]:
    caller = Caller(hooks)
    trainer = make_trainer(strategy, callbacks=[caller])
    trainer.fit(seeded(TinyWithStages), dealt_loader(24, 4), dealt_loader(8, 2))
    return weights(trainer), caller.outputs


@pytest.fixture(scope="module")
def called_in_all_hooks(ranks: RankPool) -> tuple[Weights, list[tuple[str, Tensor]]]:
    return ranks.run(_fit_calling, 2, "ddp", HOOKS)[0]


@pytest.mark.parametrize("hook", HOOKS)
def test_the_module_can_be_called_in_a_hook(
    ranks: RankPool, hook: str, called_in_all_hooks: tuple[Weights, list[tuple[str, Tensor]]]
) -> None:
    expected_weights, expected = called_in_all_hooks
    trained, outputs = ranks.run(_fit_calling, 2, "ours", [hook])[0]
    expected_outputs = [output for name, output in expected if name == hook]
    assert len(outputs) == len(expected_outputs) > 0
    assert all(torch.equal(output, expected) for (_, output), expected in zip(outputs, expected_outputs, strict=True))
    _assert_equal(trained, expected_weights)


class Bookkeeper(pl.Callback):
    """Notes between steps what the engine holds unsharded and what the module shows."""

    def __init__(self) -> None:
        self.unsharded_nbytes: list[int] = []
        self.types: set[str] = set()
        self.num_params = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.num_params = summarize(pl_module).total_parameters
        self.note(trainer)

    def note(self, trainer: pl.Trainer, *args: Any) -> None:
        self.unsharded_nbytes.append(trainer.strategy.engine.live_nbytes.get("unsharded_param", 0))
        self.types |= {type(param.data).__name__ for param in trainer.lightning_module.parameters()}

    on_train_batch_start = on_train_batch_end = on_validation_batch_end = on_train_epoch_end = on_fit_end = note


def _keep_books() -> tuple[list[int], set[str], int]:
    keeper = Bookkeeper()
    make_trainer(callbacks=[keeper]).fit(seeded(TinyWithStages), dealt_loader(24, 4), dealt_loader(8, 2))
    return keeper.unsharded_nbytes, keeper.types, keeper.num_params


def test_between_steps_everything_is_sharded(ranks: RankPool) -> None:
    for unsharded_nbytes, types, _ in ranks.run(_keep_books, 2):
        assert unsharded_nbytes == [0] * (1 + 2 * 3 + 2 + 2)
        assert types == {"FlatShardedTensor" if layouts.current() == "flat" else "RowShardedTensor"}


def test_the_model_summary_counts_whole_parameters(ranks: RankPool) -> None:
    total = sum(param.numel() for param in seeded().parameters())
    assert [num_params for _, _, num_params in ranks.run(_keep_books, 2)] == [total, total]
