"""The benchmarks run: each file imports and explains itself, and what it measures is what it says."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_strategy.engine.engine import LAYOUTS

FOLDER = Path(__file__).parent.parent / "benchmarks"
FILES = sorted(path.stem for path in FOLDER.glob("*.py"))
SCRIPTS = [name for name in FILES if not name.startswith("_")]
OURS = tuple("ours" if layout == LAYOUTS[0] else f"ours_{layout}" for layout in LAYOUTS)


@pytest.fixture
def benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where Python runs one of the scripts; what was imported is forgotten."""
    monkeypatch.syspath_prepend(FOLDER)
    yield
    for name in FILES:
        sys.modules.pop(name, None)


def run(name: str, out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The report and the output of a script that succeeds."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options, "--out", str(out / "results" / f"{name}.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((out / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert {"command", "environment"} <= report.keys()
    assert ran.stderr == ""  # no rank has anything else to say
    return report, ran.stdout


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


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_readme_has_a_section_for_every_script(name: str) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"\n## {name}.py\n" in text
    assert f"python benchmarks/{name}.py" in text


def test_contenders_that_average_gradients_compute_the_same_losses(tmp_path: Path) -> None:
    size = ["--sizes", "small", "--blocks", "2", "--dim", "32", "--rounds", "1", "--steps", "2"]
    report, output = run("step_time", tmp_path, *size)
    assert "lightning" not in output.lower()  # a table, without advice around it
    race = report["races"][0]
    assert all(race["losses_agree"] for race in report["races"])
    losses = {name: contender["losses"] for name, contender in race["contenders"].items()}
    assert [len(rank) for rank in losses["ours"]] == [4, 4]  # two ranks, two untimed steps and two timed ones
    assert losses["limit"] != losses["ours"]  # the comparison can tell: without averaging, losses are others
    for name in (*OURS, "fully_shard", "ddp", "limit"):
        assert f"| {name} | " in output


def test_host_overhead_measures_a_step_an_update_and_a_clip_of_every_contender(tmp_path: Path) -> None:
    report, output = run("host_overhead", tmp_path, "--rounds", "2", "--steps", "1")
    for samples in report["samples"].values():
        assert {name: len(times) for name, times in samples.items()} == dict.fromkeys(
            ("plain", *OURS, "fully_shard"), 2
        )
    steps = {name: spread["median"] for name, spread in report["spreads"]["step"].items()}
    assert all(ms > steps["plain"] for name, ms in steps.items() if name != "plain")  # the engines were at work
    assert "host ms per unit and step" in output


def test_host_overhead_lists_the_functions_of_a_profile(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "host_overhead.py"), "--profile", "ours", "--steps", "1", "--top", "40"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "`fsdp_strategy/engine/" in ran.stdout
    assert "other functions |" in ran.stdout


def test_memory_counts_the_state_that_every_contender_must_have(tmp_path: Path) -> None:
    report, _ = run("memory", tmp_path, "--ranks", "2", "--blocks", "3", "--dim", "128", "--rounds", "0")
    assert report["losses_agree"]
    live = report["live_nbytes"]["2"]
    block = 4 * (12 * 128**2 + 13 * 128)  # four attention and two ffn matrices, biases and norms
    states = {name: figures["state"] / (3 * block) for name, figures in live.items()}
    # Parameters, gradients and two moments: whole, with buckets on top, or halved.
    assert states == pytest.approx({"plain": 4, "ddp": 5, "fully_shard": 2, **dict.fromkeys(OURS, 2)}, rel=0.05)
    for name in OURS:
        figures = live[name]
        assert 2 * block <= figures["recorded_forward"]["unsharded_param"] <= figures["max_forward"]
        assert figures["forward"] >= 2 * block
        assert figures["backward"] >= figures["forward"]


def test_memory_measures_the_resident_set_of_every_rank(tmp_path: Path) -> None:
    size = ["--ranks", "2", "--blocks", "2", "--dim", "256", "--size", "small", "--rounds", "1"]
    report, _ = run("memory", tmp_path, *size, "--contenders", "ours")
    (grown,) = report["rss_growth_mib"]["2"]["ours"]
    # At least the shards of parameters, gradients and moments of two blocks of 12 matrices.
    assert min(grown) > 4 / 2 * 2 * 12 * 256**2 * 4 / 2**20


@pytest.mark.usefixtures("benchmarks_importable")
def test_live_storages_count_each_once_for_what_it_holds_now() -> None:
    with importlib.import_module("_live").LiveStorages() as live:
        tensor = torch.zeros(1000)
        view = tensor[10:] + 0 * tensor[:990]
        assert live.live_nbytes() == 4000 + 4 * 990
        del view
        assert live.start_peak() == 4000
        tensor.untyped_storage().resize_(0)
        assert live.live_nbytes() == 0
        tensor.untyped_storage().resize_(8000)
        tensor.neg_()
        assert (live.live_nbytes(), live.peak_nbytes) == (8000, 8000)


def test_wire_agrees_with_the_formula_and_tells_a_rival_that_sends_more(tmp_path: Path) -> None:
    report, output = run("wire", tmp_path, "--ranks", "2", "--blocks", "2", "--dim", "128", "--steps", "1")
    assert report["losses_agree"]
    rows = {(row["contender"], row["gather"], row["reduce"]): row for row in report["rows"]}
    if rows["ours", "float32", "float32"]["socket_nbytes"] is None:
        pytest.skip("this kernel does not tell what a socket has sent")
    for name in OURS:
        for gather in ("float32", "bfloat16"):
            assert 1 <= rows[name, gather, "float32"]["ratio"] < 1.1, "a small model: requests weigh more"
        assert f"Left out: {name}" in output or (name, "bfloat16", "bfloat16") in rows
    assert rows["fully_shard", "float32", "float32"]["ratio"] > 1.3  # its reduce-scatter on gloo is an all-reduce


def test_scaling_finds_the_shards_that_the_formulas_give(tmp_path: Path) -> None:
    report, _ = run("scaling", tmp_path, "--ranks", "2", "64", "--models", "few", "--rounds", "1", "--steps", "1")
    rows = {(row["contender"], row["num_ranks"]): row for row in report["rows"]}
    assert all(row["is_as_expected"] for row in rows.values())
    for num_ranks in (2, 64):
        expected = 12 * 4 * sum(ceil(num / num_ranks) for num in report["models"]["few"])
        assert rows["ours", num_ranks]["shard_nbytes"] == expected
    assert set(rows) == {(name, num_ranks) for name in OURS for num_ranks in (2, 64)}


def test_overlap_tells_who_waits_for_every_collective(tmp_path: Path) -> None:
    size = ["--blocks", "4", "--dim", "256", "--rounds", "1", "--steps", "2", "--prefetch-limits", "0", "1"]
    report, _ = run("overlap", tmp_path, *size)
    exposed = {name: row["exposed"]["median"] for name, row in report["contenders"].items()}
    assert exposed["fully_shard"] > 0.9
    for name in OURS:
        # Two gathers and a reduction of each of four blocks; without prefetch every gather is waited for.
        row = report["contenders"][f"{name}, prefetch 0"]
        assert row["delays_ms"] == pytest.approx(12 * report["delay_ms"])
        assert exposed[f"{name}, prefetch 1"] < exposed[f"{name}, prefetch 0"]
        assert exposed[f"{name}, prefetch 0"] > 0.6


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_gpu_skips_with_a_reason_where_there_is_no_device(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "gpu.py"), "--out", str(tmp_path / "gpu.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "Skipped: needs a CUDA device, and there is none.\n")
    assert not (tmp_path / "gpu.json").exists()
