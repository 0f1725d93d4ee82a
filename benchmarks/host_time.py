"""Where does the host time of a training step go?

    python benchmarks/host_time.py                      # ours, two ranks, gloo; 15 seconds on two cores
    python benchmarks/host_time.py --contender fully_shard --clock wall

One fit of a contender; the main thread of rank 0 runs under cProfile after the warm-up. On CPU autograd runs on that
thread too. Functions are listed by the time spent in themselves. What computes the model inside torch is set apart, as
every contender needs it. The profiler makes Python slower than it is: compare shares, not milliseconds, and take the
length of a step from `step_time.py`.
"""

import argparse
import cProfile
import pstats
import re
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from _contenders import CONTENDERS, SIZES, Work, fit
from _ranks import run_on_ranks

_NUM_WARMUP = 2
# Forward in full; `run_backward` holds all of backward that is not Python, autograd's own bookkeeping included.
_COMPUTE = re.compile(r"torch\._C\._nn\.|multi_head_attention|scaled_dot|layer_norm|run_backward|\blinear\b|gelu")

# What waits for another rank, or for a core, takes no CPU time.
_CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}

Row = tuple[float, float, str]  # ms a step, calls a step, function


class Profile(L.Callback):
    """Profiles the thread that trains, from the end of the warm-up."""

    def __init__(self, num_warmup: int, clock: str) -> None:
        self.profiler = cProfile.Profile(_CLOCKS[clock])
        self._num_warmup = num_warmup

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self._num_warmup:
            self.profiler.enable()

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.profiler.disable()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=CONTENDERS, default="ours")
    parser.add_argument(
        "--clock", choices=_CLOCKS, default="cpu", help="time of the thread, or wall time with all waits"
    )
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--top", type=int, default=25, help="functions to list")
    return parser.parse_args(argv)


def profile(name: str, clock: str, work: Work, num_steps: int) -> list[Row]:
    """On each rank: a fit; rank 0 returns its functions, the longest first."""
    callback = Profile(_NUM_WARMUP, clock)
    is_profiled = dist.get_rank() == 0
    fit(name, work, num_warmup=_NUM_WARMUP, num_steps=num_steps, callbacks=[callback] if is_profiled else None)
    if not is_profiled:
        return []
    stats = pstats.Stats(callback.profiler).stats  # type: ignore[attr-defined]
    rows = [
        (1e3 * own / num_steps, calls / num_steps, _describe(function))
        for function, (_, calls, own, _, _) in stats.items()
    ]
    return sorted(rows, reverse=True)


def _describe(function: tuple[str, int, str]) -> str:
    file, line, name = function
    if file == "~":  # a builtin
        return name
    parts = Path(file).parts
    roots = [i for i, part in enumerate(parts) if part in ("site-packages", "fsdp_strategy", "benchmarks")]
    first = roots[-1] + (parts[roots[-1]] == "site-packages") if roots else -1
    return f"{'/'.join(parts[first:])}:{line} {name}"


def markdown(rows: list[Row], num_listed: int) -> str:
    """The table of the longest, and the sums."""
    compute = sum(ms for ms, _, function in rows if _COMPUTE.search(function))
    host = [row for row in rows if not _COMPUTE.search(row[2])]
    lines = ["| ms a step | calls a step | function |", "|---|---|---|"]
    lines += [f"| {ms:.2f} | {calls:.1f} | `{function}` |" for ms, calls, function in host[:num_listed]]
    rest = sum(ms for ms, _, _ in host[num_listed:])
    lines.append(f"| {rest:.2f} | | {len(host[num_listed:])} other functions |")
    lines.append(f"| {compute:.2f} | | the model's own compute inside torch |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Profiles and prints."""
    args = parse_args(argv)
    batch_size, num_tokens = SIZES[args.size]
    work = Work(batch_size=batch_size, num_tokens=num_tokens)
    what = f"{args.contender}, rank 0 of {args.ranks}, {args.steps} steps of {batch_size}×{num_tokens} tokens a rank"
    print(f"{what}, {args.clock} time of the main thread\n")
    rows = run_on_ranks(args.ranks, profile, args.contender, args.clock, work, args.steps)[0]
    print(markdown(rows, args.top))
    return 0


if __name__ == "__main__":
    sys.exit(main())
