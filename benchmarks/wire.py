"""How many bytes does a rank send in a training step, and is it what the formula says?

    python benchmarks/wire.py                           # 2 and 4 ranks over gloo; about two minutes on two cores
    python benchmarks/wire.py --ranks 2 --blocks 4

The kernel counts: every TCP socket knows what it has sent, payload only. The table has the mean of the counted steps
over ranks, everything included that the ranks tell each other, and beside it what went over the loopback device
meanwhile, per rank: with headers, and with whatever else the machine sends.

The formula, for P parameters, none of them in the root unit, on N ranks, with f = (N - 1) / N: the shards are gathered
twice, f 2P elements in the dtype of the gather, and the gradients are reduced, f P elements in the dtype on the wire.
That is 12fP bytes in float32, 8fP where matrices are gathered in bfloat16, 6fP where they are reduced in it too. DDP
reduces once, 2fP elements. The losses of contenders that compute in float32 are equal.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from _models import Work
from _ranks import run_on_ranks
from _report import loss_verdict, make_parser, say, table, write_json
from _sockets import loopback_nbytes, sent_nbytes
from _trainees import CONFIG_FIELDS, OURS, prepare

MAX_DEVIATION = 0.03  # asked of ours, from the formula

_NUM_WARMUP = 2  # the first step negotiates the order of collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What travels in which dtype. `nbytes_per_param` is the formula, over f P."""

    contender: str
    gather: str
    reduce: str
    nbytes_per_param: int
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        """For the table."""
        return f"{self.contender}, {self.gather} gather, {self.reduce} reduce"

    @property
    def autocast(self) -> torch.dtype | None:
        """Compute dtype of matrix products, if not their own."""
        return torch.bfloat16 if self.gather == "bfloat16" else None


@dataclass(frozen=True, slots=True)
class Counted:
    """One rank's bytes per step, and its losses."""

    socket_nbytes: float | None
    loopback_nbytes: float | None
    losses: list[float]


def find_wires() -> list[Wire]:
    """What can be measured with this version of the engine; says what cannot."""
    wires = []
    for name in OURS:
        wires.append(Wire(contender=name, gather="float32", reduce="float32", nbytes_per_param=12))
        wires.append(Wire(contender=name, gather="bfloat16", reduce="float32", nbytes_per_param=8))
        if "reduce_wire" in CONFIG_FIELDS:
            low = (("reduce_wire", "param_dtype"),)
            wires.append(Wire(contender=name, gather="bfloat16", reduce="bfloat16", nbytes_per_param=6, config=low))
        else:
            say(f"Left out: {name} with bfloat16 on the wire of the reduction: EngineConfig has no reduce_wire.")
    wires.append(Wire(contender="fully_shard", gather="float32", reduce="float32", nbytes_per_param=12))
    wires.append(Wire(contender="fully_shard", gather="bfloat16", reduce="float32", nbytes_per_param=8))
    wires.append(Wire(contender="ddp", gather="no", reduce="float32", nbytes_per_param=8))
    return wires


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, "wire")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=3, help=f"counted steps, after {_NUM_WARMUP} that are not")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512, help="width; the feed-forward layer is four times as wide")
    args = parser.parse_args(argv)
    if min(args.ranks) < 2 or args.steps < 1:
        parser.error("expected at least two ranks and one step")
    return args


def count(wire: Wire, work: Work, num_steps: int) -> Counted:
    """On each rank: a few steps between two readings of the counters."""
    trainee = prepare(wire.contender, work, autocast=wire.autocast, config=dict(wire.config))
    losses = []
    readings: list[tuple[int | None, int | None]] = []
    for number, batch in enumerate(work.batches(_NUM_WARMUP + num_steps, rank=dist.get_rank())):
        if number == _NUM_WARMUP:
            readings.append(_read())
        losses.append(trainee.step(batch).item())
    readings.append(_read())
    sockets, loopback = (
        None if before is None or after is None else (after - before) / num_steps
        for before, after in zip(*readings, strict=True)
    )
    return Counted(sockets, None if loopback is None else loopback / dist.get_world_size(), losses)


def _read() -> tuple[int | None, int | None]:
    dist.barrier()
    return sent_nbytes(), loopback_nbytes()


def mean(values: list[float | None]) -> float | None:
    """Over ranks; None if any rank could not count."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def summarise(wire: Wire, of_ranks: list[Counted], work: Work) -> dict[str, Any]:
    """One row, in bytes."""
    num_ranks = len(of_ranks)
    formula = wire.nbytes_per_param * work.num_params * (num_ranks - 1) / num_ranks
    socket, loopback = (mean([getattr(c, kind) for c in of_ranks]) for kind in ("socket_nbytes", "loopback_nbytes"))
    counted = loopback if socket is None else socket
    return {
        **asdict(wire),
        "num_ranks": num_ranks,
        "formula_nbytes": formula,
        "socket_nbytes": socket,
        "loopback_nbytes": loopback,
        "ratio": None if counted is None else counted / formula,
        "losses": of_ranks[0].losses,
        "per_rank": [asdict(counted) for counted in of_ranks],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """MiB per rank and step."""

    def mib(nbytes: float | None) -> str | None:
        return None if nbytes is None else f"{nbytes / 2**20:.2f}"

    cells = [
        [row["contender"], row["gather"], row["reduce"], f"{row['nbytes_per_param']}fP", mib(row["formula_nbytes"]),
         mib(row["socket_nbytes"]), row["ratio"] and f"{row['ratio']:.3f}", mib(row["loopback_nbytes"]),
         repr(row["losses"][-1])]
        for row in rows
    ]  # fmt: skip
    return table(
        ["contender", "gather", "reduce", "formula", "MiB", "sent MiB", "× formula", "loopback MiB", "last loss"], cells
    )


def within(row: Mapping[str, Any]) -> bool:
    """Whether a contender of ours keeps to the formula."""
    return row["contender"] not in OURS or row["ratio"] is None or abs(row["ratio"] - 1) <= MAX_DEVIATION


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if contenders that should compute the same losses do not."""
    args = parse_args(argv)
    # Few tokens: what travels does not depend on them.
    work = Work(batch_size=1, num_tokens=8, num_blocks=args.blocks, dim=args.dim, ffn_dim=4 * args.dim)
    wires, rows, all_agree = find_wires(), [], True
    for num_ranks in args.ranks:
        of_size = []
        for wire in wires:
            of_size.append(summarise(wire, run_on_ranks(num_ranks, count, wire, work, args.steps), work))
            say(f"{num_ranks} ranks, {wire.key}: counted")
        print(
            f"\n{num_ranks} ranks, {work.num_params / 1e6:.1f} M parameters, per rank and step\n\n{markdown(of_size)}\n"
        )
        exact = {row["contender"]: row["losses"] for row in of_size if row["gather"] != "bfloat16"}
        agree, line = loss_verdict(exact)
        all_agree &= agree
        far = [row["contender"] for row in of_size if not within(row)]
        print(
            line, f"Further than {MAX_DEVIATION:.0%} from the formula: {', '.join(far) or 'none of ours'}.", end="\n\n"
        )
        rows += of_size
    write_json(args.out, {"work": asdict(work), "num_steps": args.steps, "losses_agree": all_agree, "rows": rows})
    return int(not all_agree)


if __name__ == "__main__":
    sys.exit(main())
