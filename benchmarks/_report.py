"""From the fits of all contenders to figures, a Markdown table, a JSON file and a chart."""

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning
import torch
from _contenders import Fit

# Contenders that average gradients compute the same losses. float32 sums in another order may differ in the last place.
AVERAGING = ("ours", "fully_shard", "ddp")
LOSS_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, quartiles and extremes of a sample."""

    median: float
    q1: float
    q3: float
    min: float
    max: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> "Spread":
        """Of at least one value."""
        q1, median, q3 = statistics.quantiles(sample, n=4, method="inclusive") if len(sample) > 1 else [sample[0]] * 3
        return cls(median, q1, q3, min(sample), max(sample))

    def __str__(self) -> str:
        digits = 0 if self.median >= 100 else 1
        return f"{self.median:.{digits}f} [{self.q1:.{digits}f}–{self.q3:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Standing:
    """What one contender needed. A step of each rank is one value of the sample."""

    wall_ms: Spread
    cpu_ms: Spread
    peak_rss_growth_mib: list[float] | None  # per rank
    losses: list[list[float]]  # per rank, of the first round
    repeats: bool  # every round had the same losses, bit for bit

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Fit]], peak_rss_growth_mib: list[float] | None) -> "Standing":
        """`rounds` holds the fits of all ranks, round by round."""
        losses = [[fit.losses for fit in ranks] for ranks in rounds]
        return cls(
            Spread.of([ms for ranks in rounds for fit in ranks for ms in fit.wall_ms]),
            Spread.of([ms for ranks in rounds for fit in ranks for ms in fit.cpu_ms]),
            peak_rss_growth_mib,
            losses[0],
            all(other == losses[0] for other in losses),
        )


def max_loss_difference(standings: Mapping[str, Standing]) -> float | None:
    """The largest relative difference of any step's loss between contenders that average. None for fewer than two."""
    present = [standings[name] for name in AVERAGING if name in standings]
    if len(present) < 2:
        return None
    flat = [[loss for rank in standing.losses for loss in rank] for standing in present]
    return max((max(step) - min(step)) / abs(max(step)) for step in zip(*flat, strict=True))


def markdown(standings: Mapping[str, Standing]) -> str:
    """The table: fastest, median and quartiles of a step; memory of the rank that needs most; losses of rank 0."""
    ratio_names = "× fully_shard | × ddp"
    header = (
        f"| contender | fastest | wall ms | {ratio_names} | CPU ms | {ratio_names} | RSS MiB | first loss | last loss |"
    )
    lines = [header, "|---" * (header.count("|") - 1) + "|"]
    for name, standing in standings.items():
        ratios = [
            [_ratio(standing, standings.get(rival), clock) for rival in ("fully_shard", "ddp")]
            for clock in ("wall_ms", "cpu_ms")
        ]
        rss = "–" if standing.peak_rss_growth_mib is None else f"{max(standing.peak_rss_growth_mib):.0f}"
        cells = [name, f"{standing.wall_ms.min:.0f}", standing.wall_ms, *ratios[0], standing.cpu_ms, *ratios[1], rss]
        cells += [repr(standing.losses[0][0]), repr(standing.losses[0][-1])]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _ratio(standing: Standing, rival: Standing | None, clock: str) -> str:
    if rival is None:
        return "–"
    return f"{getattr(standing, clock).median / getattr(rival, clock).median:.2f}"


def verdict(standings: Mapping[str, Standing]) -> str:
    """One line for the losses."""
    difference = max_loss_difference(standings)
    repeated = "Every round repeated its losses bit for bit."
    for name, standing in standings.items():
        if not standing.repeats:
            repeated = f"Losses of {name} differ between rounds."
    if difference is None:
        return repeated
    agree = "agree" if difference <= LOSS_TOLERANCE else "DO NOT AGREE"
    names = ", ".join(name for name in AVERAGING if name in standings)
    return f"Losses of {names} {agree}: largest relative difference {difference:.1e}. {repeated}"


def command_line() -> str:
    """As typed, without the path of the interpreter."""
    script = os.path.relpath(sys.argv[0])
    return shlex.join(["python", script, *sys.argv[1:]])


def environment() -> dict[str, Any]:
    """What the figures depend on besides the command."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "threads_per_rank": int(os.environ["OMP_NUM_THREADS"]),
        "backend": "gloo",
    }


def write_json(
    path: Path,
    work: Mapping[str, Any],
    standings: Mapping[str, Standing],
    rounds: Mapping[str, Sequence[Sequence[Fit]]],
) -> None:
    """Everything: the settings, the figures, and the raw times that they come from."""
    difference = max_loss_difference(standings)
    report = {
        "command": command_line(),
        "environment": environment(),
        "work": work,
        "max_loss_difference": difference,
        "losses_agree": None if difference is None else difference <= LOSS_TOLERANCE,
        "contenders": {name: asdict(standing) for name, standing in standings.items()},
        "rounds": {name: [[asdict(fit) for fit in ranks] for ranks in fits] for name, fits in rounds.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, standings: Mapping[str, Standing], title: str) -> bool:
    """Bars of wall and CPU time with their quartiles. False where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    mpl.set_loglevel("error")  # a first run tells about its font cache
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(1.8 + 1.4 * len(standings), 4), layout="constrained")
    for shift, (clock, label) in enumerate((("wall_ms", "wall"), ("cpu_ms", "CPU of the rank"))):
        spreads = [getattr(standing, clock) for standing in standings.values()]
        medians = [spread.median for spread in spreads]
        whiskers = [[s.median - s.q1 for s in spreads], [s.q3 - s.median for s in spreads]]
        places = [position + 0.4 * shift for position in range(len(spreads))]
        bars = axes.bar(places, medians, 0.38, yerr=whiskers, capsize=3, label=label)
        axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_xticks([position + 0.2 for position in range(len(standings))], list(standings))
    axes.set(ylabel="ms per step (median, quartiles)", title=title)
    axes.margins(y=0.12)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
