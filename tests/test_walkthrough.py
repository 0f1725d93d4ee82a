"""The walkthrough: two ranks, two layers of four weights, and what each rank stores and sends after every phase.

The expected table is written out by hand, as the step is explained on paper; the example reads it from the engine.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank_pool import RankPool

EXAMPLE = Path(__file__).parent.parent / "examples" / "walkthrough.py"


def _load_example() -> Any:
    """The example as a module under its own name, so that its reports can be pickled."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[EXAMPLE.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


walkthrough = _load_example()

# Phase; elements of the first layer and of the second; full gradients; averaged gradients; sent. Two ranks.
# "own" are the rank's two of four weights, "all" the four.
STEP = [
    ("before", "own", "own", 0, (), 0),
    ("forward layer 1: all-gather", "all", "own", 0, (), 2),
    ("forward layer 1: compute", "all", "own", 0, (), 0),
    ("forward layer 1: free", "own", "own", 0, (), 0),
    ("forward layer 2: all-gather", "own", "all", 0, (), 2),
    ("forward layer 2: compute", "own", "all", 0, (), 0),
    ("forward layer 2: free", "own", "own", 0, (), 0),
    ("loss", "own", "own", 0, (), 0),
    ("backward layer 2: all-gather", "own", "all", 0, (), 2),
    ("backward layer 2: compute gradients", "own", "all", 4, (), 0),
    ("backward layer 2: reduce-scatter", "own", "all", 4, (), 2),
    ("backward layer 2: free", "own", "own", 4, (), 0),
    ("backward layer 1: all-gather", "all", "own", 4, (), 2),
    # The reduction of layer 2 is under way while layer 1 computes; its result is kept when the next one starts.
    ("backward layer 1: compute gradients", "all", "own", 8, (), 0),
    ("backward layer 2: keep the average", "all", "own", 4, (2,), 0),
    ("backward layer 1: reduce-scatter", "all", "own", 4, (2,), 2),
    ("backward layer 1: free", "own", "own", 4, (2,), 0),
    ("backward layer 1: keep the average", "own", "own", 0, (1, 2), 0),
    ("optimizer step", "own", "own", 0, (1, 2), 0),
    ("after", "own", "own", 0, (), 0),
]
OWN = {0: {1: (1, 2), 2: (5, 6)}, 1: {1: (3, 4), 2: (7, 8)}}  # rank and layer -> numbers of the weights
ALL = {1: (1, 2, 3, 4), 2: (5, 6, 7, 8)}


def _walk(num_weights: int) -> Any:
    return walkthrough.walk(num_weights)


def _expected_rows(rank: int) -> list[Any]:
    rows = []
    for phase, first, second, full_grads, averaged, sent in STEP:
        weights = tuple(
            ALL[layer] if which == "all" else OWN[rank][layer] for layer, which in ((1, first), (2, second))
        )
        grads = tuple(n for layer in averaged for n in OWN[rank][layer])
        rows.append(walkthrough.Row(phase, weights, full_grads, grads, 8, sent))
    return rows


def test_every_rank_stores_and_sends_after_each_phase_what_the_walkthrough_says(ranks: RankPool) -> None:
    for rank, report in enumerate(ranks.run(_walk, 2, 4)):
        assert report.rows == _expected_rows(rank)


@pytest.mark.parametrize(
    ("world_size", "num_weights", "gathered", "reduced"), [(2, 4, 8, 4), (3, 6, 16, 8), (4, 8, 24, 12), (1, 4, 0, 0)]
)
def test_a_rank_sends_its_shard_of_every_layer_twice_and_the_others_their_gradients(
    ranks: RankPool, world_size: int, num_weights: int, gathered: int, reduced: int
) -> None:
    for report in ranks.run(_walk, world_size, num_weights):
        assert (report.gathered, report.reduced) == (gathered, reduced)
        assert sum(row.sent for row in report.rows) == gathered + reduced


def test_the_optimizer_step_has_no_collective(ranks: RankPool) -> None:
    assert [report.num_optimizer_events for report in ranks.run(_walk, 2, 4)] == [0, 0]


@pytest.mark.parametrize(("world_size", "num_weights"), [(2, 4), (3, 6)])
def test_before_and_after_the_step_a_rank_stores_one_nth_of_everything(
    ranks: RankPool, world_size: int, num_weights: int
) -> None:
    share = 2 * num_weights // world_size
    for report in ranks.run(_walk, world_size, num_weights):
        before, after = report.rows[0], report.rows[-1]
        assert before.weights == after.weights
        for row in (before, after):
            assert sum(len(numbers) for numbers in row.weights) == share
            assert (row.full_grads, row.num_moments) == (0, 2 * share)
        assert sum(grad.numel() for grad in report.averaged) == share


@pytest.mark.parametrize(("world_size", "num_weights"), [(2, 4), (3, 6)])
def test_gradients_are_the_averages_and_weights_those_of_unsharded_training(
    ranks: RankPool, world_size: int, num_weights: int
) -> None:
    reports = ranks.run(_walk, world_size, num_weights)
    unsharded = walkthrough.unsharded_update(world_size, num_weights)
    for layer in range(2):
        mean = sum(report.own_grads[layer] for report in reports) / world_size
        own = [report.own_grads[layer] for report in reports]
        assert not torch.equal(own[0], own[1]), "ranks have data of their own"
        assert torch.equal(torch.cat([report.averaged[layer] for report in reports]), mean)
        updated = torch.cat([report.updated[layer] for report in reports])
        # AdamW may round a long vector and a short one differently: 2**-24 of weights of size one.
        assert torch.allclose(updated, unsharded[layer], rtol=0, atol=1e-6)


def test_the_example_prints_the_tables_of_all_ranks_and_the_sums() -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert sum("stores after each phase" in line for line in lines) == 2
    for number, phase in enumerate(phase for phase, *_ in STEP):
        rows = [line for line in lines if line.startswith(f"{phase}  ")]
        assert len(rows) == 2, f"row {number} of both ranks: {phase}"
    assert "  rank 0: 12 = 8 gathered + 4 reduced" in lines
    assert "  DDP, by the formula 2 (N-1)/N P for N = 2, P = 8: 8" in lines
    assert "Collectives in the optimizer step: 0" in lines


def test_long_runs_of_weights_are_printed_as_ranges(ranks: RankPool) -> None:
    reports = ranks.run(_walk, 3, 6)
    text = walkthrough.text_of(reports, 6)
    assert "w1..w6" in text
    assert "w7..w12" in text
    assert "DDP, by the formula 2 (N-1)/N P for N = 3, P = 12: 16" in text
