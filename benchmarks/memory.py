"""How much memory does a step need above the state, and does it keep to the formula?

    python benchmarks/memory.py                         # 2 and 4 ranks; about seven minutes on two cores
    python benchmarks/memory.py --ranks 2 --rounds 1

Live bytes first: a few steps on very few tokens, so that activations are small beside parameters. They are counted
twice, by the engine's recorder, category by category, and from outside, as the bytes of all live storages, for every
contender. What a pass needs is its peak above what is there with all gradients and moments, activations included; what
`plain` needs in forward is activations alone. The formula, for units of U bytes as gathered and G as reduced, beside
the root unit: forward (1 + prefetch_limit) U, backward (1 + prefetch_limit) U + 2 U of gradients + G of reduction
buffers.

Then the growth of the resident set, as the kernel tells it: how far building, sharding and training at the size of
`step_time.py` raises the high-water mark of a fresh process that has trained a tiny model before. Contenders take
turns, round after round, each turn in processes of its own, since a process cannot take back its high-water mark.
"""

import argparse
import gc
import resource
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _formulas import most_working_nbytes
from _live import LiveStorages
from _models import SIZES, Work
from _ranks import run_on_ranks
from _report import Spread, loss_verdict, make_parser, pyplot, save_figure, say, table, write_json
from _trainees import OURS, Trainee, prepare

CONTENDERS = (*OURS, "fully_shard", "ddp", "plain")
MAX_RSS_RATIO = 0.65  # asked of ours, over fully_shard

_MIB = 2.0**20
_RSS_UNIT_MIB = 2.0**-20 if sys.platform == "darwin" else 2.0**-10
_NUM_STEPS = 3  # from the second on, ours prefetches and all have their Adam state


@dataclass(frozen=True, slots=True)
class Live:
    """The last step of one rank, in bytes. Forward and backward are peaks above `state`, with activations."""

    state: int  # parameters, gradients and moments, between backward and update
    forward: int
    backward: int
    peak: int
    recorded_forward: dict[str, int]  # peaks by category, from the recorder; empty for rivals
    recorded_backward: dict[str, int]
    max_forward: int | None  # the formula, without activations
    max_backward: int | None
    losses: list[float]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "memory")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=2, help="turns of every contender for the resident set; 0: none")
    parser.add_argument("--size", choices=SIZES, default="medium", help="of the batches for the resident set")
    parser.add_argument("--tokens", type=int, default=4, help="in the one sequence for live bytes")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512, help="width; the feed-forward layer is four times as wide")
    parser.add_argument("--prefetch-limit", type=int, default=1)
    parser.add_argument(
        "--bf16", action="store_true", help="gather and compute matrices in bfloat16, reduce in float32"
    )
    args = parser.parse_args(argv)
    if min(args.ranks) < 2 or args.rounds < 0:
        parser.error("expected at least two ranks, and no negative number of rounds")
    return args


def live_bytes(name: str, work: Work, prefetch_limit: int, autocast: torch.dtype | None) -> Live:
    """On each rank: a few steps under both counts."""
    losses = []
    with LiveStorages() as live:
        config = {"prefetch_limit": prefetch_limit}
        trainee = prepare(name, work, autocast=autocast, config=config)
        for batch in work.batches(_NUM_STEPS, rank=dist.get_rank()):
            start = live.start_peak()
            with _recording(trainee) as forward:
                loss = trainee.forward(batch)
            peak, forward_nbytes = live.peak_nbytes, live.peak_nbytes - start
            live.start_peak()
            with _recording(trainee) as backward:
                loss.backward()
            state, backward_peak = live.live_nbytes(), live.peak_nbytes
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
            losses.append(loss.item())
    bounds = most_working_nbytes(trainee.engine, prefetch_limit) if trainee.engine else (None, None)
    return Live(
        state=state,
        forward=forward_nbytes,
        backward=backward_peak - state,
        peak=max(peak, backward_peak),
        recorded_forward=dict(forward.peak_nbytes) if forward else {},
        recorded_backward=dict(backward.peak_nbytes) if backward else {},
        max_forward=bounds[0],
        max_backward=bounds[1],
        losses=losses,
    )


def _recording(trainee: Trainee) -> Any:
    return trainee.engine.record() if trainee.engine else nullcontext()


def rss_growth_mib(name: str, work: Work, prefetch_limit: int) -> float:
    """On each rank: by how much a fresh model and a few steps raise the high-water mark of the process."""
    _train(name, replace(work, batch_size=1, num_tokens=4, num_blocks=2, dim=32, ffn_dim=128), prefetch_limit)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _train(name, work, prefetch_limit)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * _RSS_UNIT_MIB


def _train(name: str, work: Work, prefetch_limit: int) -> None:
    gc.collect()
    trainee = prepare(name, work, config={"prefetch_limit": prefetch_limit})
    for batch in work.batches(_NUM_STEPS, rank=dist.get_rank()):
        trainee.step(batch)
    dist.barrier()


def measure_rss(names: list[str], args: argparse.Namespace, num_ranks: int) -> dict[str, list[list[float]]]:
    """Per contender and round: MiB of every rank."""
    batch_size, num_tokens = SIZES[args.size]
    work = Work(
        batch_size=batch_size, num_tokens=num_tokens, num_blocks=args.blocks, dim=args.dim, ffn_dim=4 * args.dim
    )
    growth: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names:
            growth[name].append(run_on_ranks(num_ranks, rss_growth_mib, name, work, args.prefetch_limit))
            mib = " ".join(f"{rank:.0f}" for rank in growth[name][-1])
            say(f"{num_ranks} ranks, round {number + 1}/{args.rounds}, {name}: resident set grew by {mib} MiB")
    return growth


def _mib(nbytes: float | None) -> str | None:
    return None if nbytes is None else f"{nbytes / _MIB:.1f}"


def passes_table(live: Mapping[str, Live], rss: Mapping[str, list[list[float]]]) -> str:
    """What passes need and may need, and the resident set; of the rank that needs most."""
    activations = live["plain"].forward if "plain" in live else 0
    rows = []
    for name, figures in live.items():
        bounds = [bound and bound + activations for bound in (figures.max_forward, figures.max_backward)]
        grown = [max(ranks) for ranks in rss.get(name, [])]
        rival = [max(ranks) for ranks in rss.get("fully_shard", [])]
        rows.append([
            name, _mib(figures.state), _mib(figures.forward), _mib(bounds[0]), _mib(figures.backward), _mib(bounds[1]),
            _mib(figures.peak), str(Spread.of(grown)) if grown else None,
            f"{median(grown) / median(rival):.2f}" if grown and rival else None, repr(figures.losses[-1]),
        ])  # fmt: skip
    header = ["contender", "state", "forward", "at most", "backward", "at most", "peak", "RSS growth", "× fully_shard"]
    return table([*header, "last loss"], rows)


def categories_table(live: Mapping[str, Live]) -> str:
    """The recorder's peaks of ours by category."""
    rows = []
    for name, figures in live.items():
        for kind, recorded in (("forward", figures.recorded_forward), ("backward", figures.recorded_backward)):
            if recorded:
                rows.append([name, kind, *(_mib(nbytes) for nbytes in recorded.values())])
    categories = next((list(f.recorded_forward) for f in live.values() if f.recorded_forward), [])
    return table(["contender", "pass", *categories], rows)


def broken_bounds(live: Mapping[str, Live]) -> list[str]:
    """What needs more than the formula and the activations together."""
    if "plain" not in live:
        return []
    activations = live["plain"].forward
    broken = []
    for name, figures in live.items():
        for kind, seen, bound in (
            ("forward", figures.forward, figures.max_forward),
            ("backward", figures.backward, figures.max_backward),
        ):
            if bound is not None and seen > bound + activations:
                broken.append(f"{name} needs {_mib(seen)} MiB in {kind}, the formula gives {_mib(bound + activations)}")
    return broken


def draw(out: Path, results: Mapping[int, Mapping[str, Live]]) -> None:
    """Stacked bars: the state, and what backward needs above it."""
    plt = pyplot()
    if plt is None:
        return
    figure, panels = plt.subplots(1, len(results), figsize=(5 * len(results), 4), layout="constrained", squeeze=False)
    for axes, (num_ranks, live) in zip(panels[0], results.items(), strict=True):
        names = list(live)
        states, backwards = ([getattr(live[name], kind) / _MIB for name in names] for kind in ("state", "backward"))
        axes.bar(names, states, label="parameters, gradients, moments")
        above = axes.bar(names, backwards, bottom=states, label="above them in backward")
        axes.bar_label(above, [f"{a:.0f} + {b:.0f}" for a, b in zip(states, backwards, strict=True)])
        axes.set(title=f"{num_ranks} ranks", ylabel="live MiB per rank")
        axes.margins(y=0.3)
        axes.tick_params(axis="x", rotation=20)
        axes.legend(loc="upper left")
    save_figure(figure, out)


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if contenders that should compute the same losses do not."""
    args = parse_args(argv)
    names = list(dict.fromkeys(args.contenders))
    few = Work(batch_size=1, num_tokens=args.tokens, num_blocks=args.blocks, dim=args.dim, ffn_dim=4 * args.dim)
    autocast = torch.bfloat16 if args.bf16 else None
    results, rss, all_agree = {}, {}, True
    for num_ranks in args.ranks:
        live = {}
        for name in names:
            of_ranks = run_on_ranks(num_ranks, live_bytes, name, few, args.prefetch_limit, autocast)
            live[name] = max(of_ranks, key=lambda figures: figures.peak)
            live[name] = replace(live[name], losses=of_ranks[0].losses)
            say(f"{num_ranks} ranks, {name}: counted live bytes")
        results[num_ranks], rss[num_ranks] = live, measure_rss(names, args, num_ranks)
        print(
            f"\n{num_ranks} ranks, {few.num_params / 1e6:.1f} M parameters, MiB\n\n{passes_table(live, rss[num_ranks])}"
        )
        print(f"\nBy the recorder:\n\n{categories_table(live)}\n")
        averaging = {name: live[name].losses for name in names if name != "plain"}
        agree, line = loss_verdict(averaging)
        all_agree &= agree or args.bf16  # rivals round to bfloat16 in other places
        print("\n".join([line, *broken_bounds(live)]), end="\n\n")
    report = {
        "work": {**asdict(few), "rss_size": args.size, "prefetch_limit": args.prefetch_limit, "bf16": args.bf16},
        "losses_agree": all_agree,
        "live_nbytes": {num: {name: asdict(f) for name, f in live.items()} for num, live in results.items()},
        "broken_bounds": {num: broken_bounds(live) for num, live in results.items()},
        "rss_growth_mib": rss,
    }
    write_json(args.out, report)
    draw(args.out, results)
    return int(not all_agree)


if __name__ == "__main__":
    sys.exit(main())
