"""What changes for one rank when there are more of them?

    python benchmarks/scaling.py                        # 2 to 4096 ranks; about three minutes, one process
    python benchmarks/scaling.py --ranks 2 64 --rounds 1

One rank of N on a fake process group, through the engine's native collectives, which here do nothing: the host time of
a training step and the bytes of its shards, for the same model at every N. Contenders and N take turns, round after
round, each turn with a group, a model and an engine of its own. Times are CPU times of the one thread.

Two models of 12 units of 12 vectors. `even`: every vector has 4096 rows, so that every N divides them. `few`: they have
60 to 115 rows, all different; once there are more ranks than rows, the equal pieces of a native all-gather are mostly
padding wherever every parameter is cut by itself, and moving it takes time.

Bytes are those of rank 0, which has most. Cut by parameter they are exactly ceil(rows / N) rows of each. In the flat
layout at most 1/N of the unit is allocated, its parameters beginning at cache lines, rounded up to a whole cache line.
Values from other ranks do not exist here, so losses mean nothing.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from _fake import empty_collectives, fake_group
from _ranks import silence
from _report import Spread, make_parser, pyplot, save_figure, say, table, write_json
from _trainees import OURS, local_of
from torch import Tensor, nn

from fsdp_strategy.engine import EngineConfig, FullyShardedEngine, LocalStep, ShardMesh

MODELS = {"even": [4096] * 12, "few": [60 + 5 * i for i in range(12)]}  # rows of the vectors of a unit
MAX_GROWTH = 1.15  # asked of the host time, over that of the fewest ranks

_NUM_UNITS = 12
_NUM_WARMUP = 3
_CACHE_LINE_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine at one N."""

    setup_s: float
    step_ms: list[float]
    shard_nbytes: int  # of the parameters that users see
    allocated_nbytes: int  # of the buffers behind them


class VectorUnit(nn.Module):
    """Adds its vectors, each to as many elements as it has."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(num) for num in rows)

    def forward(self, x: Tensor) -> Tensor:
        for vector in self.vectors:
            x = x + torch.cat([vector, vector.new_zeros(x.numel() - vector.numel())])
        return x


class Vectors(nn.Module):
    """Units of vectors, and nothing else."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.units = nn.ModuleList(VectorUnit(rows) for _ in range(_NUM_UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "scaling")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 8, 64, 512, 4096])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contenders", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=10, help=f"timed steps of a turn, after {_NUM_WARMUP} untimed ones"
    )
    args = parser.parse_args(argv)
    if min(args.ranks) < 2 or min(args.rounds, args.steps) < 1:
        parser.error("expected at least two ranks, one round and one step")
    return args


def take_turn(layout: str, rows: list[int], num_ranks: int, num_steps: int) -> Turn:
    """Sharding and a few steps as rank 0 of `num_ranks`."""
    cpu = torch.device("cpu")
    with fake_group(num_ranks), empty_collectives():
        start = time.perf_counter()
        model = Vectors(rows)
        engine = FullyShardedEngine(model, ShardMesh(cpu, native=True), EngineConfig(layout=layout))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        LocalStep(optimizer, engine.params)
        setup_s, times, x = time.perf_counter() - start, [], torch.zeros(max(rows))
        for _ in range(_NUM_WARMUP + num_steps):
            before = time.thread_time()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(1e3 * (time.thread_time() - before))
        shards = [local_of(param) for param in model.parameters()]
        nbytes = sum(shard.numel() * shard.element_size() for shard in shards)
        return Turn(setup_s, times[_NUM_WARMUP:], nbytes, engine.live_nbytes["sharded_param"])


def formula_nbytes(layout: str, rows: list[int], num_ranks: int) -> int:
    """Bytes of rank 0's shards: exact where parameters are cut by themselves, at most that in a flat layout."""
    if layout == "per_parameter":
        return 4 * _NUM_UNITS * sum(ceil(num / num_ranks) for num in rows)
    unit_nbytes = sum(_round_up(4 * num) for num in rows)
    return _NUM_UNITS * _round_up(ceil(unit_nbytes / num_ranks))


def _round_up(nbytes: int) -> int:
    """To whole cache lines."""
    return ceil(nbytes / _CACHE_LINE_NBYTES) * _CACHE_LINE_NBYTES


def race(args: argparse.Namespace) -> dict[tuple[str, str, int], list[Turn]]:
    """All turns, by model, contender and number of ranks. Each round begins with another one."""
    keys = [(model, name, num) for model in args.models for name in args.contenders for num in args.ranks]
    turns: dict[tuple[str, str, int], list[Turn]] = {key: [] for key in keys}
    for number in range(args.rounds):
        first = number * len(keys) // args.rounds
        for key in keys[first:] + keys[:first]:
            model, name, num_ranks = key
            turns[key].append(take_turn(OURS[name], MODELS[model], num_ranks, args.steps))
            setup, step = turns[key][-1].setup_s, min(turns[key][-1].step_ms)
            say(f"round {number + 1}/{args.rounds}  {model}, {name}, {num_ranks} ranks: {setup:.1f} s, {step:.1f} ms")
    return turns


def summarise(turns: dict[tuple[str, str, int], list[Turn]], fewest: int) -> list[dict[str, Any]]:
    """One row per model, contender and number of ranks."""
    rows = []
    for (model, name, num_ranks), of_key in turns.items():
        step = Spread.of([ms for turn in of_key for ms in turn.step_ms])
        base = Spread.of([ms for turn in turns[model, name, fewest] for ms in turn.step_ms])
        expected, held = formula_nbytes(OURS[name], MODELS[model], num_ranks), of_key[0]
        is_exact = OURS[name] == "per_parameter"
        rows.append({
            "model": model, "contender": name, "num_ranks": num_ranks, "step_ms": asdict(step), "text": str(step),
            "growth": step.median / base.median, "setup_s": min(turn.setup_s for turn in of_key),
            "shard_nbytes": held.shard_nbytes, "allocated_nbytes": held.allocated_nbytes, "formula_nbytes": expected,
            "is_as_expected": held.shard_nbytes == expected if is_exact else held.allocated_nbytes <= expected,
            "turns": [asdict(turn) for turn in of_key],
        })  # fmt: skip
    return rows


def markdown(rows: list[dict[str, Any]], fewest: int) -> str:
    """The table."""
    cells = [
        [row["model"], row["contender"], row["num_ranks"], row["text"], f"{row['growth']:.2f}", row["shard_nbytes"],
         row["formula_nbytes"], "yes" if row["is_as_expected"] else "NO", row["allocated_nbytes"],
         f"{row['setup_s']:.2f}"]
        for row in rows
    ]  # fmt: skip
    header = ["model", "contender", "ranks", "host ms per step", f"× {fewest} ranks", "shard bytes", "formula", "kept"]
    return table([*header, "allocated", "setup, s"], cells)


def draw(out: Path, rows: list[dict[str, Any]]) -> None:
    """Host time and bytes over the number of ranks."""
    plt = pyplot()
    if plt is None:
        return
    figure, (times, nbytes) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for model, name in dict.fromkeys((row["model"], row["contender"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["contender"]) == (model, name)]
        ranks, label = [row["num_ranks"] for row in mine], f"{name}, {model}"
        times.plot(ranks, [row["step_ms"]["median"] for row in mine], marker="o", label=label)
        nbytes.plot(ranks, [row["allocated_nbytes"] for row in mine], marker="o", label=label)
    times.set(xscale="log", xlabel="ranks", ylabel="host ms per step (median)", yscale="log")
    nbytes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="bytes of shards on rank 0, as allocated")
    times.legend()
    save_figure(figure, out)


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if shards have other sizes than the formula gives them."""
    args = parse_args(argv)
    silence()
    torch.set_num_threads(1)
    fewest = min(args.ranks)
    rows = summarise(race(args), fewest)
    print(f"\n{markdown(rows, fewest)}\n")
    grown = [f"{r['model']}, {r['contender']}, {r['num_ranks']}" for r in rows if r["growth"] > MAX_GROWTH]
    print(f"Host time more than {MAX_GROWTH - 1:.0%} above that of {fewest} ranks: {'; '.join(grown) or 'nowhere'}.\n")
    write_json(args.out, {"num_units": _NUM_UNITS, "models": MODELS, "rows": rows}, backend="fake")
    draw(args.out, rows)
    return int(not all(row["is_as_expected"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
