"""Importing the package makes its names known to `Trainer(strategy=...)`, and the Trainer gets what it asks for."""

import importlib
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry

import fsdp_strategy
from fsdp_strategy import FullyShardedStrategy

NAMES = ["fully_sharded", "fully_sharded_fork", "fully_sharded_spawn"]


def _make_trainer(strategy: str | FullyShardedStrategy, devices: int = 2) -> pl.Trainer:
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_registered_with_a_description(name: str) -> None:
    assert name in StrategyRegistry.available_strategies()
    assert StrategyRegistry[name]["description"]


def test_reimporting_keeps_the_names() -> None:
    importlib.reload(fsdp_strategy)
    assert set(NAMES) <= set(StrategyRegistry.available_strategies())


def test_lightning_imported_first_gets_the_names() -> None:
    for name in NAMES:
        del StrategyRegistry[name]
    importlib.reload(fsdp_strategy)
    assert set(NAMES) <= set(StrategyRegistry.available_strategies())


def test_lightning_imported_later_gets_the_names() -> None:
    code = (
        "import sys, fsdp_strategy\n"
        "assert 'lightning' not in sys.modules\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "print(*StrategyRegistry.available_strategies())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert set(NAMES) <= set(result.stdout.split()), result.stderr


@pytest.mark.parametrize("name", [*NAMES, "FULLY_SHARDED"])
def test_a_trainer_resolves_the_name(trainer_process: None, name: str) -> None:
    strategy = _make_trainer(name).strategy
    assert type(strategy) is FullyShardedStrategy
    assert strategy.launcher is not None


@pytest.mark.parametrize(("name", "start_method"), [("fully_sharded_fork", "fork"), ("fully_sharded_spawn", "spawn")])
def test_the_name_chooses_how_ranks_are_started(trainer_process: None, name: str, start_method: str) -> None:
    launcher = _make_trainer(name).strategy.launcher
    assert launcher._start_method == start_method
    assert launcher.is_interactive_compatible == (start_method == "fork")  # notebooks ask for it


def test_the_trainer_may_bring_several_devices_and_machines(trainer_process: None) -> None:
    strategy = _make_trainer("fully_sharded", devices=3).strategy
    strategy.num_nodes = 2
    assert isinstance(strategy, ParallelStrategy)
    assert strategy.num_processes == 3
    assert strategy.root_device == torch.device("cpu")
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 0}


def test_the_strategy_asks_for_samplers_and_metrics_of_distributed_training() -> None:
    assert FullyShardedStrategy().is_distributed


def test_weights_are_restored_into_the_shards() -> None:
    strategy = FullyShardedStrategy()
    assert strategy.restore_checkpoint_after_setup
    assert strategy.lightning_restore_optimizer


def test_before_ranks_are_started_one_process_speaks_for_all() -> None:
    strategy = FullyShardedStrategy()
    value = torch.ones(2)
    strategy.barrier()
    assert strategy.broadcast("directory") == "directory"
    assert strategy.reduce(value) is value
    assert strategy.reduce("text") == "text"


def test_two_strategies_share_no_state(trainer_process: None) -> None:
    first, second = _make_trainer("fully_sharded").strategy, _make_trainer("fully_sharded", devices=3).strategy
    assert (first.num_processes, second.num_processes) == (2, 3)
