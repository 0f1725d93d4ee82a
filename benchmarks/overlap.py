"""How much of the time that collectives take is hidden behind compute?

    python benchmarks/overlap.py                        # one process; about two minutes
    python benchmarks/overlap.py --prefetch-limits 1 --rounds 1

One rank of two on a fake process group. Its collectives take half of a block's forward each: waiting for one returns no
earlier than that after it was started, or after the one before it on the same group has ended, as on a network that is
busy. Nothing computes or sends meanwhile; the thread that waits sleeps. What the training thread sleeps through is
exposed, the rest of the delays was hidden. The share is told twice: by the sleeps, and by the clock, as the step time
with the delays less that without, over the sum of the delays. The first gather of a forward, the first of a backward
and the last reduction have nothing to hide behind: 3 of the 36 collectives of 12 blocks.

Contenders take turns, round after round, with the delays and without. `fully_shard` gets the same delays through its
own interface for custom collectives; on CPU it waits for each of them at once. The other rank does not exist, so losses
say nothing about training; `step_time.py` compares those of the same contenders.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _fake import fake_group
from _models import SIZES, Batch, Work, loss_of, make_blocks
from _ranks import silence
from _report import Spread, make_parser, pyplot, save_figure, say, table, write_json
from _slow import Network, slow_down, slow_down_torch
from _trainees import OURS, Trainee, prepare

MAX_EXPOSED = 0.15  # asked of ours

_NUM_RANKS = 2
_NUM_WARMUP = 2


@dataclass(slots=True)
class Steps:
    """The timed steps of one contender, in ms."""

    plain: list[float] = field(default_factory=list)  # without delays
    delayed: list[float] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)  # the sum of a step's


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "overlap")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn, with delays and without")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512, help="width; the feed-forward layer is four times as wide")
    parser.add_argument("--prefetch-limits", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--contenders", nargs="+", choices=[*OURS, "fully_shard"], default=[*OURS, "fully_shard"])
    parser.add_argument("--delay", type=float, default=0.5, help="of a collective, in forward times of a block")
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps, args.blocks) < 1:
        parser.error("expected at least one round, step and block")
    return args


def block_seconds(work: Work) -> float:
    """How long the forward of one block takes on this machine."""
    model, batch, times = make_blocks(work), work.batches(1, rank=0)[0], []
    for _ in range(5):
        start = time.perf_counter()
        loss_of(model, batch)
        times.append((time.perf_counter() - start) / work.num_blocks)
    return median(times)


def make_trainees(names: list[str], work: Work, limits: list[int], network: Network) -> dict[str, Trainee]:
    """All contenders, ours once for each prefetch limit."""
    trainees = {}
    for name in names:
        if name == "fully_shard":
            trainees[name] = prepare(name, work)
            slow_down_torch(trainees[name].model, network)
            continue
        for limit in limits:
            trainees[f"{name}, prefetch {limit}"] = prepare(
                name, work, config={"prefetch_limit": limit}, prepare_mesh=lambda mesh: slow_down(mesh, network)
            )
    return trainees


def race(
    trainees: dict[str, Trainee], batch: Batch, network: Network, delay_seconds: float, args: argparse.Namespace
) -> dict[str, Steps]:
    """Every contender in turn, round after round. Each round begins with another one."""
    steps, order = {name: Steps() for name in trainees}, list(trainees)
    for trainee in trainees.values():
        for _ in range(_NUM_WARMUP):
            trainee.step(batch)
    for number in range(args.rounds):
        first = number % len(order)
        for name in order[first:] + order[:first]:
            for _ in range(args.steps):
                for seconds in (0.0, delay_seconds):
                    _time_step(trainees[name], batch, steps[name], network, seconds)
            slept, delays = median(steps[name].slept[-args.steps :]), steps[name].delays[-1]
            say(f"round {number + 1}/{args.rounds}  {name}: slept {slept:.1f} of {delays:.1f} ms a step")
    return steps


def _time_step(trainee: Trainee, batch: Batch, steps: Steps, network: Network, delay_seconds: float) -> None:
    network.start(delay_seconds)
    start = time.perf_counter()
    trainee.step(batch)
    wall_ms = 1e3 * (time.perf_counter() - start)
    if not delay_seconds:
        steps.plain.append(wall_ms)
        return
    steps.delayed.append(wall_ms)
    steps.slept.append(1e3 * network.slept_seconds)
    steps.delays.append(1e3 * network.num_collectives * delay_seconds)


def work_of(args: argparse.Namespace) -> Work:
    """The model and the batch that were asked for."""
    batch_size, num_tokens = SIZES[args.size]
    return Work(
        batch_size=batch_size, num_tokens=num_tokens, num_blocks=args.blocks, dim=args.dim, ffn_dim=4 * args.dim
    )


def summarise(steps: Steps) -> dict[str, Any]:
    """One row."""
    plain, delayed = Spread.of(steps.plain), Spread.of(steps.delayed)
    shares = [slept / delays for slept, delays in zip(steps.slept, steps.delays, strict=True)]
    return {
        "plain": str(plain),
        "delayed": str(delayed),
        "delays_ms": steps.delays[0],
        "exposed": asdict(Spread.of(shares)),
        "exposed_by_clock": (delayed.median - plain.median) / steps.delays[0],
        "steps": asdict(steps),
    }


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table."""
    cells = []
    for name, row in rows.items():
        exposed = "{median:.1%} [{q1:.1%}–{q3:.1%}]".format(**row["exposed"])
        clock = f"{row['exposed_by_clock']:.0%}"
        cells.append([name, row["plain"], row["delayed"], f"{row['delays_ms']:.0f}", exposed, clock])
    header = ["contender", "step, ms", "with delays, ms", "sum of delays, ms", "exposed", "by the clock"]
    return table(header, cells)


def draw(out: Path, rows: dict[str, dict[str, Any]]) -> None:
    """Bars of the exposed share."""
    plt = pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(1.8 + 1.4 * len(rows), 4), layout="constrained")
    shares = [100 * row["exposed"]["median"] for row in rows.values()]
    axes.bar_label(axes.bar(list(rows), shares), fmt="%.0f %%")
    axes.axhline(100 * MAX_EXPOSED, color="grey", linestyle="--")
    axes.tick_params(axis="x", rotation=20)
    axes.set(ylabel="exposed, % of the delays")
    save_figure(figure, out)


def main(argv: list[str] | None = None) -> int:
    """Measures and prints."""
    args = parse_args(argv)
    silence()
    torch.set_num_threads(1)
    work, network = work_of(args), Network()
    delay_seconds = args.delay * block_seconds(work)
    say(f"{work.num_params / 1e6:.1f} M parameters; every collective takes {1e3 * delay_seconds:.2f} ms")
    with fake_group(_NUM_RANKS):
        trainees = make_trainees(list(dict.fromkeys(args.contenders)), work, args.prefetch_limits, network)
        steps = race(trainees, work.batches(1, rank=0)[0], network, delay_seconds, args)
    rows = {name: summarise(of_name) for name, of_name in steps.items()}
    print(f"\n{markdown(rows)}\n\nAsked of ours: less than {MAX_EXPOSED:.0%} exposed.\n")
    report = {"work": asdict(work), "num_ranks": _NUM_RANKS, "delay_ms": 1e3 * delay_seconds, "contenders": rows}
    write_json(args.out, report, backend="fake")
    draw(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
