"""How long is a training step, and what does it cost in CPU time, beside the rivals?

    python benchmarks/step_time.py                      # two ranks over gloo; about twelve minutes on two cores
    python benchmarks/step_time.py --sizes medium --rounds 5 --wire-size none
    python benchmarks/step_time.py --sizes medium --contenders ours fully_shard

The contenders train the same model on the same batches under a Lightning Trainer, and take turns on the same rank
processes, round after round, so that whatever else the machine does hits all of them. Every turn is a fresh fit with
the same seed: the first steps are not timed, and the losses of all steps are compared. There is a race for every size
of the batches, in float32, and one in bf16-mixed, in which the dtype on the wire of the reduction makes a difference
(and which many CPUs compute slowly). The tables go to the terminal, and everything, raw times included, to a JSON file,
with a chart beside it where matplotlib is installed. Memory is the subject of `memory.py`.
"""

import argparse
import sys
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from _contenders import CONTENDERS, LOW_WIRE, Fit, fit
from _models import SIZES, Work
from _ranks import run_on_ranks
from _report import make_parser, say, write_json
from _standings import Standing, draw, losses_agree, markdown, max_loss_difference, verdict

# The first step learns the order of collectives (ours) or rebuilds buckets (ddp); all build Adam's state.
_NUM_WARMUP = 2


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "step_time")
    sizes = ", ".join(f"{name} {batch}x{tokens}" for name, (batch, tokens) in SIZES.items())
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help=f"sequences x tokens: {sizes}")
    parser.add_argument("--wire-size", choices=[*SIZES, "none"], default="small", help="of the race in bf16-mixed")
    parser.add_argument("--rounds", type=int, default=3, help="fits of every contender")
    parser.add_argument("--steps", type=int, default=5, help=f"timed steps of a fit, after {_NUM_WARMUP} untimed ones")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512, help="width; the feed-forward layer is four times as wide")
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps, args.ranks, args.blocks) < 1:
        parser.error("expected at least one round, step, rank and block")
    return args


def race(names: list[str], work: Work, precision: str, num_rounds: int, num_steps: int) -> dict[str, list[Fit]]:
    """On each rank: every contender in turn, round after round. Each round begins with another one."""
    fits: dict[str, list[Fit]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turn = fit(name, work, num_warmup=_NUM_WARMUP, num_steps=num_steps, precision=precision)
            fits[name].append(turn)
            if dist.get_rank() == 0:
                steps = " ".join(f"{ms:.0f}" for ms in turn.wall_ms)
                say(f"round {number + 1}/{num_rounds}  {name:<11}  wall ms of rank 0: {steps}")
    return fits


def run_race(size: str, precision: str, args: argparse.Namespace) -> tuple[dict[str, Standing], dict[str, Any]]:
    """Race, print, and return the standings and the report."""
    names = [name for name in dict.fromkeys(args.contenders) if precision != "32-true" or name not in LOW_WIRE]
    batch_size, num_tokens = SIZES[size]
    work = Work(
        batch_size=batch_size, num_tokens=num_tokens, num_blocks=args.blocks, dim=args.dim, ffn_dim=4 * args.dim
    )
    tokens = f"{batch_size}×{num_tokens} tokens a rank"
    say(f"{size}: {work.num_params / 1e6:.1f} M parameters, {tokens}, {args.ranks} CPU ranks, {precision}")
    of_ranks = run_on_ranks(args.ranks, race, names, work, precision, args.rounds, args.steps)
    rounds = {name: list(zip(*(fits[name] for fits in of_ranks), strict=True)) for name in names}
    standings = {name: Standing.of(of_name) for name, of_name in rounds.items()}
    print(f"\n{markdown(standings)}\n\n{verdict(standings, precision)}\n", flush=True)
    return standings, {
        "size": size,
        "precision": precision,
        "num_ranks": args.ranks,
        "work": asdict(work),
        "max_loss_difference": max_loss_difference(standings),
        "losses_agree": losses_agree(standings, precision),
        "contenders": {name: asdict(standing) for name, standing in standings.items()},
        "rounds": {name: [[asdict(fit) for fit in ranks] for ranks in of_name] for name, of_name in rounds.items()},
    }


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if contenders that should compute the same losses do not."""
    args = parse_args(argv)
    races = [(size, "32-true") for size in dict.fromkeys(args.sizes)]
    if args.wire_size != "none" and LOW_WIRE:
        races.append((args.wire_size, "bf16-mixed"))
    elif args.wire_size != "none":
        say("Left out: the race of both wires in bf16-mixed, since FullyShardedStrategy has no reduce_wire.")
    reports, charts = [], {}
    for size, precision in races:
        standings, report = run_race(size, precision, args)
        reports.append(report)
        charts[f"{size}, {precision}"] = standings
    write_json(args.out, {"races": reports})
    draw(args.out, charts)
    return int(not all(report["losses_agree"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
