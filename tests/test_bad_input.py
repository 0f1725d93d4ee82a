"""Mistakes are met with what was expected, what was given, where, and what to do: on every rank, without a hang."""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from fsdp_strategy import FullyShardedStrategy
from tests.models import Block, Tiny, dealt_loader, seeded
from tests.pooled_trainer import make_strategy, make_trainer
from tests.rank_pool import RankPool

# -- the constructor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("layout", "diagonal"),
        ("start_method", "thread"),
        ("reduce_dtype", "float7"),
        ("prefetch_limit", -1),
        ("prefetch_limit", 1.5),
    ],
)
def test_a_choice_that_does_not_exist_is_named_with_its_value(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Expected {argument} to be .*got {value!r}"):
        FullyShardedStrategy(**{argument: value})


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match="shard_everything"):
        FullyShardedStrategy(shard_everything=True)  # type: ignore[call-arg]


def test_arguments_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        FullyShardedStrategy("auto")  # type: ignore[misc]


class TransformerEngine(Precision):
    precision = "transformer-engine"


def test_a_precision_that_is_not_supported_is_named() -> None:
    with pytest.raises(ValueError, match="'transformer-engine'"):
        FullyShardedStrategy(precision_plugin=TransformerEngine())


def test_a_precision_that_is_not_supported_is_named_when_the_trainer_brings_it() -> None:
    with pytest.raises(ValueError, match="'transformer-engine'"):
        pl.Trainer(strategy=FullyShardedStrategy(), accelerator="cpu", devices=2, plugins=[TransformerEngine()])


def test_the_engine_before_setup_is_an_error_that_says_when_it_is_there() -> None:
    with pytest.raises(RuntimeError, match=r"no engine yet.*on_fit_start"):
        _ = FullyShardedStrategy().engine


# -- the model --------------------------------------------------------------------------------------------------------


class NothingLikeIt:
    """A predicate that selects no module."""

    def __call__(self, fqn: str, module: nn.Module) -> bool:
        return False


class Scale(nn.Module):
    """Cannot initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))


class OnMeta(Tiny):
    def __init__(self, on_ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.head.scale = Scale()
        if dist.get_rank() in on_ranks:
            self.head.scale.to("meta")


class WiderOnRank1(Tiny):
    def __init__(self) -> None:
        super().__init__(width=7 if dist.get_rank() == 1 else 5)


class LongerOnRank1(Tiny):
    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() == 1:
            self.blocks.append(Block())


class RenamedOnRank1(Tiny):
    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank() == 1:
            self.blocks[1].right = self.blocks[1].__dict__["_modules"].pop("up")


class FrozenOnRank1(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(dist.get_rank() != 1)


def _fit_error(cls: type[Tiny], model: dict[str, Any], strategy: dict[str, Any]) -> tuple[str, str, float]:
    """The type and message of what a fit raises, and the seconds that it took."""
    trainer = make_trainer(make_strategy(**strategy))
    module = seeded(cls, **model)
    start = time.monotonic()
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        trainer.fit(module, dealt_loader(8, 2))
    return error.type.__name__, str(error.value), time.monotonic() - start


MODELS: dict[str, tuple[type[Tiny], dict[str, Any], dict[str, Any], list[str]]] = {
    "a_pattern_that_matches_nothing": (Tiny, {}, {"units": "NoSuchBlock"}, ["'NoSuchBlock'", "Block", "'blocks"]),
    "one_pattern_of_two": (Tiny, {}, {"units": ["Block", "layers.*"]}, ["'layers.*'", "units='auto'"]),
    "a_predicate_that_selects_nothing": (Tiny, {}, {"units": NothingLikeIt()}, ["`units`", "predicate"]),
    "a_container_as_unit": (Tiny, {}, {"units": "blocks"}, ["`blocks`", "ModuleList", "'blocks.*'"]),
    "no_values_on_meta": (
        OnMeta,
        {"on_ranks": (0, 1)},
        {},
        ["every rank", "`head.scale`", "'gain'", "reset_parameters"],
    ),
    "no_values_on_meta_on_one_rank": (OnMeta, {"on_ranks": (1,)}, {}, ["[rank 1]", "`head.scale`", "torch.device"]),
    "checkpointing_nothing": (Tiny, {}, {"activation_checkpointing": "Nothing"}, ["`activation_check", "'Nothing'"]),
    "another_width_on_one_rank": (WiderOnRank1, {}, {}, ["rank 1", "`stem.weight`", "(5, 3)", "(7, 3)"]),
    "another_depth_on_one_rank": (LongerOnRank1, {}, {}, ["rank 1", "`blocks.3.norm.weight`"]),
    "another_name_on_one_rank": (RenamedOnRank1, {}, {}, ["rank 1", "`blocks.1.up.weight`"]),
    "frozen_on_one_rank": (FrozenOnRank1, {}, {}, ["rank 1", "`head.weight`"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_sharded_is_an_error_on_every_rank(ranks: RankPool, name: str) -> None:
    cls, model, strategy, expected = MODELS[name]
    for kind, message, seconds in ranks.run(_fit_error, 2, cls, model, strategy):
        assert kind == "ValueError"
        assert [text for text in expected if text not in message] == [], message
        assert seconds < 10  # a rank that waited for the other would wait for the group's timeout


def _fit_error_with_devices(devices: int) -> str:
    with pytest.raises(ValueError, match="devices") as error:
        make_trainer(devices=devices).fit(seeded(), dealt_loader(8, 2))
    return str(error.value)


@pytest.mark.parametrize("devices", [1, 3])
def test_another_number_of_devices_than_ranks_is_an_error_on_every_rank(ranks: RankPool, devices: int) -> None:
    for rank, message in enumerate(ranks.run(_fit_error_with_devices, 2, devices)):
        assert f"[rank {rank}] Expected {devices} ranks" in message
        assert "got 2" in message


# -- the optimizer ----------------------------------------------------------------------------------------------------


class BuiltEarly(Tiny):
    """Its optimizer is there before the parameters are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


class ListedEarly(Tiny):
    """Its optimizer is built in time, from a list of parameters that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.early = [self.head.weight, self.head.bias]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": self.blocks.parameters()}, {"params": self.early}], lr=0.1)


class WithAStranger(Tiny):
    """Its optimizer holds a tensor that the module does not."""

    def __init__(self) -> None:
        super().__init__()
        self.stranger = [torch.zeros(3, 4, requires_grad=True)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([*self.parameters(), *self.stranger], lr=0.1)


class GrowsLater(Tiny):
    """Adds a layer when training has begun, and gives it to the optimizer."""

    def on_train_start(self) -> None:
        self.extra = nn.Linear(2, 2)
        self.optimizers().add_param_group({"params": self.extra.parameters()})


OPTIMIZERS: dict[str, tuple[type[Tiny], list[str]]] = {
    "built_in_the_constructor": (BuiltEarly, ["optimizer 0 (SGD)", "`scale`", "configure_optimizers"]),
    "built_from_an_early_list": (ListedEarly, ["optimizer 0 (SGD)", "`head.weight`", "configure_optimizers"]),
    "over_a_foreign_tensor": (WithAStranger, ["optimizer 0 (Adam)", "(3, 4)", "configure_optimizers"]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_over_other_tensors_than_the_shards_is_an_error(ranks: RankPool, name: str) -> None:
    cls, expected = OPTIMIZERS[name]
    for rank, (kind, message, _) in enumerate(ranks.run(_fit_error, 2, cls, {}, {})):
        assert kind == "ValueError"
        assert [text for text in [f"[rank {rank}]", *expected] if text not in message] == [], message


def test_a_parameter_that_comes_after_setup_is_an_error(ranks: RankPool) -> None:
    for kind, message, seconds in ranks.run(_fit_error, 2, GrowsLater, {}, {}):
        assert kind == "ValueError"
        assert [text for text in ["SGD", "configure_model", "neither sharded"] if text not in message] == [], message
        assert seconds < 10
