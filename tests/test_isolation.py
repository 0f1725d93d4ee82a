"""What a test leaves behind in the pytest process is named and undone."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.isolation import process_restored


def test_a_block_that_restores_everything_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with process_restored() as leaks, monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
    assert leaks == []


@pytest.mark.parametrize("name", ["LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_a_launcher_set_is_named_and_removed(name: str) -> None:
    with process_restored() as leaks:
        os.environ[name] = "1"
    assert leaks == [f"{name}: None -> '1'"]
    assert name not in os.environ


def test_a_variable_that_was_changed_or_removed_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("NODE_RANK", "0")
    with process_restored() as leaks:
        os.environ["LOCAL_RANK"] = "1"
        del os.environ["NODE_RANK"]
    assert leaks == ["LOCAL_RANK: '0' -> '1'", "NODE_RANK: '0' -> None"]
    assert (os.environ["LOCAL_RANK"], os.environ["NODE_RANK"]) == ("0", "0")


def test_a_process_group_that_was_left_is_named_and_destroyed(tmp_path: Path) -> None:
    with process_restored() as leaks:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert leaks == ["an initialised process group"]
    assert not dist.is_initialized()


def test_a_block_that_raises_is_undone_too() -> None:
    def leak_and_raise() -> None:
        with process_restored():
            os.environ["LOCAL_RANK"] = "1"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leak_and_raise()
    assert "LOCAL_RANK" not in os.environ


def test_a_trainer_process_may_leave_variables_behind(trainer_process: None) -> None:
    os.environ["MASTER_PORT"] = "1"
