"""From the fits of all contenders to figures, a table, a verdict on the losses, and a chart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _contenders import Fit
from _report import LOSS_TOLERANCE, Spread, max_difference, pyplot, save_figure, table

# In bf16-mixed rivals round in other places: weights cast once or at every use, gradients summed in another dtype.
LOW_PRECISION_LOSS_TOLERANCE = 1e-2

_RIVALS = ("fully_shard", "ddp")


@dataclass(frozen=True, slots=True)
class Standing:
    """What one contender needed. A step of each rank is one value of the sample."""

    wall_ms: Spread
    cpu_ms: Spread
    losses: list[list[float]]  # per rank, of the first round
    repeats: bool  # every round had the same losses, bit for bit

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Fit]]) -> "Standing":
        """`rounds` holds the fits of all ranks, round by round."""
        losses = [[fit.losses for fit in ranks] for ranks in rounds]
        return cls(
            Spread.of([ms for ranks in rounds for fit in ranks for ms in fit.wall_ms]),
            Spread.of([ms for ranks in rounds for fit in ranks for ms in fit.cpu_ms]),
            losses[0],
            all(other == losses[0] for other in losses),
        )


def max_loss_difference(standings: Mapping[str, Standing]) -> float:
    """The largest relative difference of any step's loss between contenders that average gradients."""
    return max_difference([loss for rank in s.losses for loss in rank] for n, s in standings.items() if n != "limit")


def losses_agree(standings: Mapping[str, Standing], precision: str) -> bool:
    """Whether contenders that average gradients computed the same losses."""
    tolerance = LOSS_TOLERANCE if precision == "32-true" else LOW_PRECISION_LOSS_TOLERANCE
    return max_loss_difference(standings) <= tolerance


def markdown(standings: Mapping[str, Standing]) -> str:
    """The table: fastest, median and quartiles of a step; losses of rank 0."""
    ratio_names = [f"× {rival}" for rival in _RIVALS]
    header = ["contender", "fastest", "wall ms", *ratio_names, "CPU ms", *ratio_names, "first loss", "last loss"]
    rows = []
    for name, standing in standings.items():
        cells: list[Any] = [name, f"{standing.wall_ms.min:.0f}"]
        for clock in ("wall_ms", "cpu_ms"):
            cells += [getattr(standing, clock), *(_ratio(standing, standings.get(rival), clock) for rival in _RIVALS)]
        rows.append([*cells, repr(standing.losses[0][0]), repr(standing.losses[0][-1])])
    return table(header, rows)


def _ratio(standing: Standing, rival: Standing | None, clock: str) -> str | None:
    if rival is None:
        return None
    return f"{getattr(standing, clock).median / getattr(rival, clock).median:.2f}"


def verdict(standings: Mapping[str, Standing], precision: str) -> str:
    """One line for the losses."""
    differing = [name for name, standing in standings.items() if not standing.repeats]
    repeated = "Every round repeated its losses bit for bit."
    if differing:
        repeated = f"Losses of {', '.join(differing)} differ between rounds."
    names = [name for name in standings if name != "limit"]
    if len(names) < 2:
        return repeated
    agree = "agree" if losses_agree(standings, precision) else "DO NOT AGREE"
    difference = max_loss_difference(standings)
    return f"Losses of {', '.join(names)} {agree}: largest relative difference {difference:.1e}. {repeated}"


def draw(out: Path, races: Mapping[str, Mapping[str, Standing]]) -> None:
    """For every race, bars of wall and CPU time with their quartiles."""
    plt = pyplot()
    if plt is None:
        return
    figure, panels = plt.subplots(1, len(races), figsize=(6 * len(races), 4.5), layout="constrained", squeeze=False)
    for axes, (title, standings) in zip(panels[0], races.items(), strict=True):
        for shift, (clock, label) in enumerate((("wall_ms", "wall"), ("cpu_ms", "CPU of the rank"))):
            _draw_bars(axes, 0.4 * shift, label, [getattr(standing, clock) for standing in standings.values()])
        axes.set_xticks([position + 0.2 for position in range(len(standings))], list(standings), rotation=20)
        axes.set(ylabel="ms per step (median, quartiles)", title=title)
        axes.margins(y=0.12)
        axes.legend()
    save_figure(figure, out)


def _draw_bars(axes: Any, shift: float, label: str, spreads: list[Spread]) -> None:
    medians = [spread.median for spread in spreads]
    whiskers = [[s.median - s.q1 for s in spreads], [s.q3 - s.median for s in spreads]]
    places = [position + shift for position in range(len(spreads))]
    bars = axes.bar(places, medians, 0.38, yerr=whiskers, capsize=3, label=label)
    axes.bar_label(bars, fmt="%.0f", padding=3)
