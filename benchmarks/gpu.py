"""What does sharding cost on a GPU, what does it save, and is it right?

    python benchmarks/gpu.py                            # one CUDA device; about three minutes
    python benchmarks/gpu.py --sections memory overlap

Without a CUDA device it says so and succeeds. One device is enough, since the other ranks do not have to exist:

* `step`: the step time at world size 1, against the plain module and `fully_shard`: what the machinery costs.
* `host`: host time per unit and step on tiny tensors, one of 8 ranks of a fake process group.
* `memory`: what forward and backward need above the state, one of 8 and of 64 ranks, as the allocator of the device
  tells it, against the formula of `memory.py`.
* `overlap`: every collective is a kernel of half a block's forward on a stream of its own that does nothing; exposed is
  the step time with these kernels less that without, over the sum of their times.
* `ranks`: two ranks of the engine on the one device, over gloo, against one process on the joined batch.

Contenders take turns, round after round. Each section runs in processes of its own. Matrices are gathered and computed
in bfloat16, but for `overlap`, where TF32 leaves a unit one message, and `ranks`, which compares float32. On fake
groups losses mean nothing.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from _fake import fake_group
from _formulas import most_working_nbytes
from _models import TINY, Work
from _ranks import run_alone, run_on_ranks
from _report import Spread, make_parser, max_difference, say, table, write_json
from _slow import DeviceNetwork, slow_down, slow_down_torch
from _trainees import OURS, Trainee, prepare
from _turns import race

BACKEND, DEVICE = "nccl", torch.device("cuda", 0)
BF16 = torch.bfloat16
RIVALS = ("plain", "fully_shard")

# Losses of several steps. bfloat16 rounds differently where weights are cast once and where at every use.
_BF16_LOSS_TOLERANCE, _LOSS_TOLERANCE = 1e-2, 1e-4
_MIB = 2.0**20
_NUM_HOST_UNITS = TINY.num_blocks + 1
_DELAY = 0.5  # of a collective, in forward times of a block

Section = tuple[bool, str, dict[str, Any]]  # whether it is right, the table, everything


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "gpu")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--dim", type=int, default=2048, help="width; the feed-forward layer is four times as wide")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens in each")
    return parser.parse_args(argv)


def work_of(args: argparse.Namespace) -> Work:
    """The model that was asked for, with heads of 64."""
    return Work(
        batch_size=args.batch, num_tokens=args.tokens, num_blocks=args.blocks, dim=args.dim,
        num_heads=max(1, args.dim // 64), ffn_dim=4 * args.dim,
    )  # fmt: skip


def device_name() -> str | None:
    """Of the first CUDA device, asked in a process of its own: what has touched a device cannot be forked."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def time_steps(args: argparse.Namespace) -> Section:
    """At world size 1, every contender on the device at once."""
    work, losses = work_of(args), {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(BACKEND, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        names = ["plain", *OURS, "fully_shard"]
        trainees = {name: prepare(name, work, device=DEVICE, autocast=BF16, fused=True) for name in names}
        (batch,) = work.batches(1, rank=0, device=DEVICE)
        for name, trainee in trainees.items():
            losses[name] = [trainee.step(batch).item() for _ in range(3)]
        say("step: warmed up")
        samples = race(
            {name: lambda trainee=trainee: trainee.step(batch) for name, trainee in trainees.items()},
            num_rounds=args.rounds, num_calls=args.steps, clock=time.perf_counter, settle=torch.cuda.synchronize,
            is_timed_to_the_end=True,
        )  # fmt: skip
        dist.destroy_process_group()
    spreads = {name: Spread.of(ms) for name, ms in samples.items()}
    rows = [
        [name, spread, *(f"{spread.median / spreads[rival].median:.3f}" for rival in RIVALS), repr(losses[name][-1])]
        for name, spread in spreads.items()
    ]
    text = table(["contender", "step, ms", "× plain", "× fully_shard", "last loss"], rows)
    difference = max_difference(losses.values())
    found = {"samples": samples, "losses": losses, "max_loss_difference": difference}
    return (
        difference <= _BF16_LOSS_TOLERANCE,
        f"{text}\n\nLargest relative difference of losses: {difference:.1e}",
        found,
    )


def time_host(args: argparse.Namespace) -> Section:
    """How long the host needs to put a step of tiny tensors on the device, whose own time is less."""
    (batch,) = TINY.batches(1, rank=0, device=DEVICE)
    with fake_group(8):
        trainees = {name: prepare(name, TINY, device=DEVICE, fused=True) for name in ("plain", *OURS, "fully_shard")}
        samples = race(
            {name: trainee.warmed_up(batch) for name, trainee in trainees.items()}, num_rounds=3 * args.rounds,
            num_calls=args.steps, clock=time.perf_counter, settle=torch.cuda.synchronize,
        )  # fmt: skip
    medians = {name: Spread.of(ms).median for name, ms in samples.items()}
    own = {name: (median - medians["plain"]) / _NUM_HOST_UNITS for name, median in medians.items() if name != "plain"}
    rows = [
        [name, Spread.of(samples[name]), own.get(name) and f"{own[name]:.3f}",
         own.get(name) and f"{own[name] / own['fully_shard']:.2f}"]
        for name in samples
    ]  # fmt: skip
    header = ["contender", "forward + backward, ms of the host", "ms per unit and step", "× fully_shard"]
    return True, table(header, rows), {"samples": samples, "ms_per_unit": own}


def measure_peaks(name: str, num_ranks: int, work: Work) -> dict[str, int | None]:
    """In a process of its own: what the second step needs, in bytes."""
    with fake_group(num_ranks):
        trainee = prepare(name, work, device=DEVICE, autocast=BF16, fused=True)
        (batch,) = work.batches(1, rank=0, device=DEVICE)
        for _ in range(2):
            trainee.step(batch)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        loss = trainee.forward(batch)
        forward = torch.cuda.max_memory_allocated() - start
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        state, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        bounds = most_working_nbytes(trainee.engine, 1) if trainee.engine else (None, None)
        return {
            "state": state, "forward": forward, "backward": peak - state, "peak": peak, "max_forward": bounds[0],
            "max_backward": bounds[1], "reserved": torch.cuda.max_memory_reserved(),
        }  # fmt: skip


def compare_peaks(args: argparse.Namespace) -> Section:
    """At 8 and 64 ranks, on few tokens, so that activations are small beside parameters."""
    few = Work(**{**asdict(work_of(args)), "batch_size": 1, "num_tokens": 8})
    found: dict[str, Any] = {}
    rows = []
    for num_ranks in (8, 64):
        for name in (*OURS, "fully_shard"):
            peaks = run_alone(measure_peaks, name, num_ranks, few)
            found[f"{name}, {num_ranks} ranks"] = peaks
            rows.append([name, num_ranks, *(nbytes and f"{nbytes / _MIB:.0f}" for nbytes in peaks.values())])
            say(f"memory: {name}, {num_ranks} ranks")
    header = ["contender", "ranks", "state", "forward", "backward", "peak", "forward at most", "backward at most"]
    return True, "MiB\n\n" + table([*header, "reserved"], rows), found


def slowed(name: str, work: Work, network: DeviceNetwork) -> Trainee:
    """A contender on the slow network."""
    trainee = prepare(name, work, device=DEVICE, fused=True, prepare_mesh=lambda mesh: slow_down(mesh, network))
    if name == "fully_shard":
        slow_down_torch(trainee.model, network)
    return trainee


def block_seconds(work: Work) -> float:
    """How long the forward of one block takes."""
    plain = prepare("plain", work, device=DEVICE)
    (batch,) = work.batches(1, rank=0, device=DEVICE)
    samples = race(
        {"forward": lambda: plain.forward(batch)}, num_rounds=1, num_calls=5, clock=time.perf_counter,
        settle=torch.cuda.synchronize, is_timed_to_the_end=True,
    )  # fmt: skip
    return Spread.of(samples["forward"]).median / 1e3 / work.num_blocks


def measure_overlap(args: argparse.Namespace) -> Section:
    """The exposed share by the clock."""
    torch.set_float32_matmul_precision("high")
    work = work_of(args)
    delay = _DELAY * block_seconds(work)
    found: dict[str, Any] = {"delay_ms": 1e3 * delay}
    rows = []
    (batch,) = work.batches(1, rank=0, device=DEVICE)
    with fake_group(8):
        network = DeviceNetwork()
        for name in (*OURS, "fully_shard"):
            trainee = slowed(name, work, network)
            trainee.warmed_up(batch)
            samples, delay_sum = _with_and_without(trainee, batch, network, delay, args)
            plain, delayed = Spread.of(samples["plain"]), Spread.of(samples["delayed"])
            exposed = (delayed.median - plain.median) / delay_sum
            found[name] = {"samples": samples, "sum_of_delays_ms": delay_sum, "exposed": exposed}
            rows.append([name, plain, delayed, f"{delay_sum:.1f}", f"{exposed:.1%}"])
            say(f"overlap: {name}")
            del trainee
            gc.collect()
    header = ["contender", "step, ms", "with delays, ms", "sum of delays, ms", "exposed"]
    return True, f"A collective takes {1e3 * delay:.2f} ms\n\n{table(header, rows)}", found


def _with_and_without(
    trainee: Trainee, batch: Any, network: DeviceNetwork, delay: float, args: argparse.Namespace
) -> tuple[dict[str, list[float]], float]:
    """Step times with the delays and without, and the sum of the delays of a step in ms."""

    def step(seconds: float) -> None:
        network.start(seconds)
        trainee.step(batch)

    samples = race(
        {"plain": lambda: step(0.0), "delayed": lambda: step(delay)}, num_rounds=args.rounds, num_calls=args.steps,
        clock=time.perf_counter, settle=torch.cuda.synchronize, is_timed_to_the_end=True,
    )  # fmt: skip
    return samples, 1e3 * delay * network.num_collectives


def train_on_half(name: str, work: Work, num_steps: int) -> list[float]:
    """On each of two ranks that share the device: losses on its own batches, through the backend's collectives."""
    trainee = prepare(name, work, device=DEVICE, native=True)
    return [trainee.step(b).item() for b in work.batches(num_steps, rank=dist.get_rank(), device=DEVICE)]


def train_joined(work: Work, num_steps: int) -> list[float]:
    """One process on both ranks' batches together."""
    trainee = prepare("plain", work, device=DEVICE)
    halves = zip(*(work.batches(num_steps, rank=rank, device=DEVICE) for rank in range(2)), strict=True)
    joined = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in halves]
    return [trainee.step(batch).item() for batch in joined]


def compare_ranks(args: argparse.Namespace) -> Section:
    """The average loss of two ranks is that of the joined batch."""
    num_steps = 5
    work = Work(batch_size=2, num_tokens=64, num_blocks=4, dim=256, num_heads=4, ffn_dim=1024)
    losses = {"one process": run_alone(train_joined, work, num_steps)}
    for name in OURS:
        of_ranks = run_on_ranks(2, train_on_half, name, work, num_steps)
        losses[f"{name}, 2 ranks"] = [sum(pair) / 2 for pair in zip(*of_ranks, strict=True)]
        say(f"ranks: {name}")
    difference = max_difference(losses.values())
    text = table(["contender", "first loss", "last loss"], [[n, repr(of[0]), repr(of[-1])] for n, of in losses.items()])
    found = {"losses": losses, "max_loss_difference": difference}
    return difference <= _LOSS_TOLERANCE, f"{text}\n\nLargest relative difference: {difference:.1e}", found


# Sections, and whether they start processes of their own.
SECTIONS: dict[str, tuple[Callable[[argparse.Namespace], Section], bool]] = {
    "step": (time_steps, False),
    "host": (time_host, False),
    "memory": (compare_peaks, True),
    "overlap": (measure_overlap, False),
    "ranks": (compare_ranks, True),
}


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if losses differ that should be equal."""
    args = parse_args(argv)
    name = run_alone(device_name)
    if name is None:
        print("Skipped: needs a CUDA device, and there is none.")
        return 0
    report: dict[str, Any] = {"device": name, "work": asdict(work_of(args))}
    all_right = True
    for section in args.sections:
        measure, has_processes = SECTIONS[section]
        start = time.perf_counter()
        is_right, text, found = measure(args) if has_processes else run_alone(measure, args)
        report[section] = {"is_right": is_right, "seconds": time.perf_counter() - start, **found}
        all_right &= is_right
        print(f"\n## {section}\n\n{text}\n\n{report[section]['seconds']:.0f} s\n", flush=True)
    write_json(args.out, report, backend="nccl, fake, gloo")
    return int(not all_right)


if __name__ == "__main__":
    sys.exit(main())
