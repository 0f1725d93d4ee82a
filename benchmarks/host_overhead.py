"""What does the host pay for sharding, whatever the network?

    python benchmarks/host_overhead.py                  # one process; under a minute
    python benchmarks/host_overhead.py --profile ours   # where that time goes

A fake process group whose collectives return at once, and a model whose tensors are so small that neither compute nor
copies need time: 12 blocks of 12 parameters and a norm of 2, sharded by 8 ranks. What a contender needs above the
plain module is its host time, given per unit (12 blocks and the root unit) and step. Then AdamW (`fused`) and clipping
by norm over the 146 sharded parameters, against the same calls over plain tensors of the same shapes. All times are CPU
times of the one thread, which other programs on the machine disturb least. Contenders take turns, round after round.

Values from other ranks do not exist here, so losses mean nothing; `step_time.py` compares those of the same contenders.

With `--profile` one contender trains under cProfile instead. The profiler makes Python slower than it is: compare
shares, not milliseconds.
"""

import argparse
import cProfile
import pstats
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from _fake import fake_group
from _models import TINY
from _ranks import silence
from _report import Spread, make_parser, say, table, write_json
from _trainees import OURS, Trainee, local_of, prepare
from _turns import Call, Samples, race
from torch import nn

from fsdp_strategy.engine.gradnorm import clip_grad_norm

CONTENDERS = ("plain", *OURS, "fully_shard")
MAX_UNIT_RATIO, MAX_UPDATE_RATIO = 0.4, 1.3  # asked of ours: over fully_shard, over plain tensors

_NUM_WARMUP = 3  # the first step learns the order of collectives, and builds the state of AdamW
_NUM_UNITS = TINY.num_blocks + 1


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "host_overhead")
    parser.add_argument("--rounds", type=int, default=12, help="turns of every contender")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, updates and clips of a turn")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that the fake group pretends to have")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--profile", choices=CONTENDERS, help="list the functions that need most time, and stop")
    parser.add_argument("--top", type=int, default=25, help="functions to list with --profile")
    args = parser.parse_args(argv)
    if min(args.rounds, args.steps) < 1 or args.ranks < 2:
        parser.error("expected at least one round and step, and two ranks")
    return args


def plain_like(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Plain parameters with the shapes of the shards."""
    shards = [local_of(param) for param in params]
    return [nn.Parameter(torch.zeros(shard.shape)) for shard in shards]


def with_grads(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Finite values and gradients, which stay clear of denormal numbers however often they are clipped."""
    for param in params:
        assert param.grad is not None
        for tensor in (param.data, param.grad):
            local_of(tensor).fill_(0.01)
    return params


def make_updates(trainees: dict[str, Trainee]) -> tuple[dict[str, Call], dict[str, Call]]:
    """The optimizer steps and the clips of all contenders, `plain` being tensors of the shapes of the shards."""
    steps: dict[str, Call] = {}
    clips: dict[str, Call] = {}
    sharded = next(trainee for name, trainee in trainees.items() if name != "plain")
    for name, trainee in trainees.items():
        params, optimizer = list(trainee.model.parameters()), trainee.optimizer
        if name == "plain":
            params = plain_like(list(sharded.model.parameters()))
            optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
            for param in params:
                param.grad = torch.zeros_like(param)
        else:
            trainee.forward(TINY.batches(1, rank=0)[0]).backward()
        with_grads(params)
        steps[name] = optimizer.step
        clips[name] = _make_clip(trainee, params)
        for _ in range(_NUM_WARMUP):
            steps[name]()
            clips[name]()
    return steps, clips


def _make_clip(trainee: Trainee, params: list[nn.Parameter]) -> Call:
    if trainee.engine is None:
        return lambda: nn.utils.clip_grad_norm_(params, 0.05)
    collectives = trainee.engine.mesh.collectives
    return lambda: clip_grad_norm(params, 0.05, collectives)


def measure(names: list[str], num_ranks: int, num_rounds: int, num_calls: int) -> dict[str, Samples]:
    """By what is measured: `step`, `update`, `clip`."""
    take_turns = partial(race, num_rounds=num_rounds, num_calls=num_calls)
    with fake_group(num_ranks):
        trainees = {name: prepare(name, TINY, fused=True) for name in names}
        (batch,) = TINY.batches(1, rank=0)
        say(f"{_NUM_UNITS} units, {num_rounds} rounds of {num_calls} calls: forward and backward")
        samples = {"step": take_turns({name: trainees[name].warmed_up(batch) for name in names})}
        say("the optimizer's step, and clipping")
        updates, clips = make_updates(trainees)
        samples["update"] = take_turns(updates)
        samples["clip"] = take_turns(clips)
        return samples


def host_ms_per_unit(steps: Samples, name: str) -> float:
    """What the contender needs above the plain module, per unit and step."""
    return (Spread.of(steps[name]).median - Spread.of(steps["plain"]).median) / _NUM_UNITS


def report(samples: dict[str, Samples]) -> str:
    """The two tables, with what is asked of ours."""
    steps = samples["step"]
    rows = []
    for name, times in steps.items():
        own = host_ms_per_unit(steps, name) if "plain" in steps and name != "plain" else None
        ratio = own and "fully_shard" in steps and own / host_ms_per_unit(steps, "fully_shard")
        rows.append([name, Spread.of(times), own and f"{own:.3f}", f"{ratio:.2f}" if ratio else None])
    text = table(["contender", "forward + backward, ms", "host ms per unit and step", "× fully_shard"], rows)
    rows = []
    for name in steps:
        cells: list[object] = [name]
        for what in ("update", "clip"):
            spread = Spread.of(samples[what][name])
            plain = samples[what].get("plain")
            cells += [spread, plain and f"{spread.median / Spread.of(plain).median:.2f}"]
        rows.append(cells)
    text += "\n\n" + table(["contender", "AdamW step, ms", "× plain", "clip by norm, ms", "× plain"], rows)
    asked = f"Asked of ours: host time at most {MAX_UNIT_RATIO} of fully_shard's, step and clip at most"
    return f"{text}\n\n{asked} {MAX_UPDATE_RATIO} of plain tensors'."


def profile(name: str, num_ranks: int, num_steps: int, num_listed: int) -> str:
    """A table of the functions with most time in themselves, over whole training steps of one contender."""
    profiler = cProfile.Profile(time.thread_time)
    with fake_group(num_ranks):
        trainee = prepare(name, TINY, fused=True)
        (batch,) = TINY.batches(1, rank=0)
        for number in range(_NUM_WARMUP + num_steps):
            if number == _NUM_WARMUP:
                profiler.enable()
            trainee.step(batch)
        profiler.disable()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    functions = sorted(
        ((own, calls, function) for function, (_, calls, own, _, _) in stats.items()), key=lambda row: -row[0]
    )
    rows = [
        [f"{1e3 * own / num_steps:.3f}", f"{calls / num_steps:.1f}", f"`{_describe(function)}`"]
        for own, calls, function in functions[:num_listed]
    ]
    rest = functions[num_listed:]
    rows.append([f"{1e3 * sum(own for own, _, _ in rest) / num_steps:.3f}", "", f"{len(rest)} other functions"])
    return table(["ms a step", "calls a step", "function"], rows)


def _describe(function: tuple[str, int, str]) -> str:
    file, line, name = function
    if file == "~":  # a builtin
        return name
    parts = Path(file).parts
    roots = [i for i, part in enumerate(parts) if part in ("site-packages", "fsdp_strategy", "benchmarks")]
    first = roots[-1] + (parts[roots[-1]] == "site-packages") if roots else -1
    return f"{'/'.join(parts[first:])}:{line} {name}"


def main(argv: list[str] | None = None) -> int:
    """Measures, or profiles, and prints."""
    args = parse_args(argv)
    silence()
    torch.set_num_threads(1)
    if args.profile:
        print(profile(args.profile, args.ranks, max(args.steps, 5), args.top))
        return 0
    samples = measure(list(dict.fromkeys(args.contenders)), args.ranks, args.rounds, args.steps)
    print(f"\n{report(samples)}\n")
    spreads = {what: {name: asdict(Spread.of(ms)) for name, ms in by.items()} for what, by in samples.items()}
    settings = {"num_ranks": args.ranks, "num_units": _NUM_UNITS, **asdict(TINY)}
    write_json(args.out, {"work": settings, "spreads": spreads, "samples": samples}, backend="fake")
    return 0


if __name__ == "__main__":
    sys.exit(main())
