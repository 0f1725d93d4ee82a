"""How long is a training step, and what does it cost in CPU time and memory, beside the rivals?

    python benchmarks/step_time.py                      # two ranks, gloo; about two minutes on two cores
    python benchmarks/step_time.py --size large --rounds 5
    python benchmarks/step_time.py --contenders ours fully_shard

The contenders train the same model on the same batches under a Lightning Trainer, and take turns on the same rank
processes, round after round, so that whatever else the machine does hits all of them. Every turn is a fresh fit with
the same seed: the first steps are not timed, and the losses of all steps are compared. Memory is measured afterwards,
in processes of its own, since a process cannot take back its high-water mark. The table goes to the terminal, and
everything, raw times included, to a JSON file, with a chart beside it where matplotlib is installed.
"""

import argparse
import dataclasses
import resource
import sys
from pathlib import Path

import torch.distributed as dist
from _contenders import CONTENDERS, SIZES, Fit, Work, fit
from _ranks import run_on_ranks
from _report import LOSS_TOLERANCE, Standing, draw, markdown, max_loss_difference, verdict, write_json

_NUM_WARMUP = (
    2  # the first step learns the order of collectives (ours) or rebuilds buckets (ddp); all build Adam's state
)
_RSS_UNIT_MIB = 2.0**-20 if sys.platform == "darwin" else 2.0**-10


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ", ".join(f"{name} {batch}x{tokens}" for name, (batch, tokens) in SIZES.items())
    parser.add_argument("--size", choices=SIZES, default="medium", help=f"sequences x tokens of one rank: {sizes}")
    parser.add_argument("--rounds", type=int, default=3, help="fits of every contender")
    parser.add_argument("--steps", type=int, default=6, help=f"timed steps of a fit, after {_NUM_WARMUP} untimed ones")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512, help="width; the feed-forward layer is four times as wide")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory out")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/step_time.json"))
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps, args.ranks, args.blocks) < 1:
        parser.error("expected at least one round, step, rank and block")
    return args


def race(names: list[str], work: Work, num_rounds: int, num_steps: int) -> dict[str, list[Fit]]:
    """On each rank: every contender in turn, round after round. Each round begins with another one."""
    fits: dict[str, list[Fit]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turn = fit(name, work, num_warmup=_NUM_WARMUP, num_steps=num_steps)
            fits[name].append(turn)
            if dist.get_rank() == 0:
                steps = " ".join(f"{ms:.0f}" for ms in turn.wall_ms)
                print(f"round {number + 1}/{num_rounds}  {name:<11}  wall ms of rank 0: {steps}", flush=True)
    return fits


def peak_rss_growth_mib(name: str, work: Work) -> float:
    """On one rank: by how much a fit raises the high-water mark of the process.

    A fit of a small model comes before, so that what is imported or allocated once does not count.
    """
    small = dataclasses.replace(work, batch_size=1, num_tokens=4, num_blocks=2, dim=32, ffn_dim=128)
    fit(name, small, num_warmup=0, num_steps=2)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fit(name, work, num_warmup=0, num_steps=4)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * _RSS_UNIT_MIB


def measure_memory(names: list[str], work: Work, num_ranks: int) -> dict[str, list[float]]:
    """Per contender and rank, each in a fresh process."""
    growth = {}
    for name in names:
        growth[name] = run_on_ranks(num_ranks, peak_rss_growth_mib, name, work)
        print(
            f"memory     {name:<11}  peak RSS growth per rank: {' '.join(f'{g:.0f}' for g in growth[name])} MiB",
            flush=True,
        )
    return growth


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if contenders that should compute the same losses do not."""
    args = parse_args(argv)
    names = list(dict.fromkeys(args.contenders))
    batch_size, num_tokens = SIZES[args.size]
    work = Work(
        batch_size=batch_size, num_tokens=num_tokens, num_blocks=args.blocks, dim=args.dim, ffn_dim=4 * args.dim
    )
    title = f"{work.num_params / 1e6:.1f} M parameters, {batch_size}×{num_tokens} tokens a rank, {args.ranks} CPU ranks"
    print(f"{title}; {args.rounds} rounds of {_NUM_WARMUP} untimed and {args.steps} timed steps", flush=True)
    of_ranks = run_on_ranks(args.ranks, race, names, work, args.rounds, args.steps)
    rounds = {name: list(zip(*(fits[name] for fits in of_ranks), strict=True)) for name in names}
    memory = {} if args.no_memory else measure_memory(names, work, args.ranks)
    standings = {name: Standing.of(rounds[name], memory.get(name)) for name in names}
    print(f"\n{markdown(standings)}\n\n{verdict(standings)}")
    write_json(args.out, {"size": args.size, "num_ranks": args.ranks, **dataclasses.asdict(work)}, standings, rounds)
    chart = args.out.with_suffix(".png")
    drawn = draw(chart, standings, title)
    print(f"Written: {args.out}, {chart}" if drawn else f"Written: {args.out} (a chart needs matplotlib)")
    return int((max_loss_difference(standings) or 0.0) > LOSS_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
