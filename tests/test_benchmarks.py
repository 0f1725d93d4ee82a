"""The benchmarks run: each file imports and explains itself, and contenders that average gradients end up equal."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))
SCRIPTS = [name for name in FILES if not name.startswith("_")]


@pytest.fixture
def benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where Python runs one of the scripts; what was imported is forgotten."""
    monkeypatch.syspath_prepend(FOLDER)
    yield
    for name in FILES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("benchmarks_importable")
@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_and_says_what_it_is_for(name: str) -> None:
    assert importlib.import_module(name).__doc__


@pytest.mark.usefixtures("benchmarks_importable")
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_how_to_run_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module(name).main(["--help"])
    assert exit_info.value.code == 0
    assert f"python benchmarks/{name}.py" in capsys.readouterr().out


def test_contenders_that_average_gradients_compute_the_same_losses(tmp_path: Path) -> None:
    out = tmp_path / "results" / "step_time.json"
    size = ["--size", "small", "--blocks", "2", "--dim", "32", "--rounds", "1", "--steps", "2", "--no-memory"]
    command = [sys.executable, str(FOLDER / "step_time.py"), *size, "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "lightning" not in (ran.stdout + ran.stderr).lower()  # a table, without advice around it

    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["losses_agree"] is True
    losses = {name: contender["losses"] for name, contender in report["contenders"].items()}
    assert [len(rank) for rank in losses["ours"]] == [4, 4]  # two ranks, two untimed steps and two timed ones
    assert losses["limit"] != losses["ours"]  # the comparison can tell: without averaging, losses are others
    assert {"command", "environment"} <= report.keys()
    for name in ("ours", "fully_shard", "ddp", "limit"):
        assert f"| {name} | " in ran.stdout
