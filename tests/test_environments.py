"""Command lines and clusters: LightningCLI with a YAML file, its help, and ranks that SLURM has started."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_strategy import FullyShardedStrategy

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = [name for name in inspect.signature(FullyShardedStrategy.__init__).parameters if name != "self"]


def _run(*command: str, **env: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=_environment(**env))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _environment(**env: str) -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(EXAMPLES.parent), **env}


@pytest.mark.slow
def test_the_yaml_of_the_examples_trains() -> None:
    output = _run(
        sys.executable, str(EXAMPLES / "cli.py"), "fit", f"--config={EXAMPLES / 'gpt.yaml'}", "--trainer.max_steps=2",
        "--data.num_steps=2", "--trainer.limit_val_batches=1", "--trainer.strategy.init_args.prefetch_limit=2",
    )  # fmt: skip
    assert "max_steps=2` reached" in output


@pytest.mark.slow
def test_every_argument_is_documented_on_the_command_line() -> None:
    output = _run(
        sys.executable, str(EXAMPLES / "cli.py"), "fit", "--trainer.strategy.help=fsdp_strategy.FullyShardedStrategy"
    )
    for name in ARGUMENTS:
        assert f"--trainer.strategy.{name}" in output


@pytest.mark.slow
def test_ranks_started_by_slurm_find_each_other(tmp_path: Path) -> None:
    script = Path(__file__).parent / "launch_script.py"
    common = {
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "4242", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), "fully_sharded", str(tmp_path)],
            env=_environment(**common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=110)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert list(tmp_path.iterdir()), "rank 0 has written its weights"


@pytest.mark.parametrize(
    "name", ["auto_wrap_policy", "sharding_strategy", "state_dict_type", "data_parallel_size", "stage"]
)
def test_an_argument_of_another_sharded_strategy_is_met_with_ours(name: str) -> None:
    with pytest.raises(TypeError, match=f"no argument '{name}': "):
        FullyShardedStrategy(**{name: None})
