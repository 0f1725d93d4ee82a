"""Ranks started by fork, by spawn, by running the script again and by torchrun train the same weights."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import launch_script
from tests.models import Batch, Tiny, TinyWithStages, loader, seeded
from tests.pooled_trainer import make_trainer
from tests.rank_pool import RankPool

SCRIPT = Path(launch_script.__file__)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
COMMANDS = {
    "spawn": [str(SCRIPT), "fully_sharded_spawn"],
    "script": [str(SCRIPT), "fully_sharded"],
    "torchrun": [*TORCHRUN, str(SCRIPT), "fully_sharded"],
}
TIMEOUT_S = 120


def _start(arguments: list[str], directory: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent), "OMP_NUM_THREADS": "1"}
    with (directory / "output.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *arguments, str(directory)], env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def _fork(directory: Path) -> None:
    dist.destroy_process_group()  # the pool's own; forked ranks meet in another
    launch_script.train("fully_sharded_fork", directory)


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The directory that each way of launching has left its results in."""
    directories = {name: tmp_path_factory.mktemp(name) for name in (*COMMANDS, "fork")}
    ranks.run(_fork, 1, directories["fork"])
    # At the same time: most of what they do is to import torch and Lightning, one process after another.
    processes = {name: _start(command, directories[name]) for name, command in COMMANDS.items()}
    try:
        for name, process in processes.items():
            assert process.wait(TIMEOUT_S) == 0, (directories[name] / "output.txt").read_text()
        yield directories
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _trained(directory: Path) -> dict[str, Tensor]:
    return torch.load(directory / "trained.ckpt", weights_only=True)["state_dict"]


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [fqn for fqn, tensor in expected.items() if not torch.equal(actual[fqn], tensor)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spawn", "script", "torchrun"])
def test_every_launcher_trains_the_same_weights(outcomes: dict[str, Path], name: str) -> None:
    _assert_equal(_trained(outcomes[name]), _trained(outcomes["fork"]))
    assert not torch.equal(_trained(outcomes[name])["scale"], seeded().scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fork", "spawn"])
def test_the_parent_gets_the_whole_trained_weights_back(outcomes: dict[str, Path], name: str) -> None:
    state_dict = torch.load(outcomes[name] / "parent.pt", weights_only=True)["state_dict"]
    assert {type(tensor) for tensor in state_dict.values()} == {Tensor}
    _assert_equal(state_dict, _trained(outcomes[name]))


@pytest.mark.slow
def test_a_forked_fit_takes_under_five_seconds(outcomes: dict[str, Path]) -> None:
    # One second where the machine is idle; nothing is imported, nothing waits for a timeout.
    assert torch.load(outcomes["fork"] / "parent.pt")["seconds"] < 5


# -- fork -------------------------------------------------------------------------------------------------------------


def _make_forking_trainer(**kwargs: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy="fully_sharded_fork",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )


def _fork_beside_a_group() -> str:
    with pytest.raises(RuntimeError) as error:
        _make_forking_trainer().fit(seeded(), loader(24, 2))
    return str(error.value)


def test_fork_refuses_when_the_parent_has_a_process_group(ranks: RankPool) -> None:
    [message] = ranks.run(_fork_beside_a_group, 1)
    assert "Expected no process group in the process that forks ranks" in message
    assert "destroy_process_group" in message


class FailsOnOneRank(Tiny):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if batch_idx == 1 and self.global_rank == 1:
            raise ZeroDivisionError("the sample of rank 1 is broken")
        return super().training_step(batch, batch_idx)


def _fork_and_fail() -> tuple[str, float]:
    dist.destroy_process_group()
    start = time.monotonic()
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as error:
        _make_forking_trainer().fit(seeded(FailsOnOneRank), loader(24, 2))
    return str(error.value), time.monotonic() - start


def test_an_exception_on_one_forked_rank_surfaces_at_once(ranks: RankPool) -> None:
    [[message, seconds]] = ranks.run(_fork_and_fail, 1)
    assert "Process 1 terminated with the following error" in message
    assert "ZeroDivisionError: the sample of rank 1 is broken" in message
    assert seconds < 10  # far below the timeout of 30 minutes that the other rank would wait for


def _fork_several_stages() -> tuple[list[float], Any]:
    dist.destroy_process_group()
    model = seeded(TinyWithStages)
    trainer = _make_forking_trainer(use_distributed_sampler=False)
    [before] = trainer.test(model, loader(20, 4), verbose=False)
    trainer.fit(model, loader(24, 4), loader(20, 4))
    [after] = trainer.test(model, loader(20, 4), verbose=False)
    validated = float(trainer.callback_metrics["test_loss"])
    trainer.predict(model, loader(5, 1), return_predictions=False)
    return [before["test_loss"], after["test_loss"], validated]


def _expected_stages() -> list[float]:
    dist.destroy_process_group()
    model = seeded(TinyWithStages)
    trainer = make_trainer("single")
    [before] = trainer.test(model, loader(20, 4), verbose=False)
    trainer.fit(model, loader(24, 4), loader(20, 4))
    [after] = trainer.test(model, loader(20, 4), verbose=False)
    return [before["test_loss"], after["test_loss"], after["test_loss"]]


def test_forked_stages_follow_each_other(ranks: RankPool) -> None:
    # Both ranks see all samples: their mean gradient is that of one device, exactly.
    assert ranks.run(_fork_several_stages, 1) == ranks.run(_expected_stages, 1)


# -- launched from outside --------------------------------------------------------------------------------------------


def _fit_with_too_many_devices() -> tuple[str, float]:
    """As torchrun has set the environment of each rank."""
    os.environ.update(TORCHELASTIC_RUN_ID="test", RANK=f"{dist.get_rank()}", LOCAL_RANK=f"{dist.get_rank()}")
    os.environ.update(WORLD_SIZE=f"{dist.get_world_size()}", GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    start = time.monotonic()
    with pytest.raises(ValueError, match="devices") as error:
        pl.Trainer(strategy="fully_sharded", accelerator="cpu", devices=4, logger=False).fit(seeded(), loader(24, 2))
    return str(error.value), time.monotonic() - start


def test_another_number_of_devices_than_torchrun_started_is_an_error_on_every_rank(ranks: RankPool) -> None:
    for message, seconds in ranks.run(_fit_with_too_many_devices, 2):
        assert "devices=4" in message
        assert "world size (2)" in message
        assert seconds < 5
