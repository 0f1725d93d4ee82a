"""The loss curve as a picture."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from stdlib_text import Baselines

_TRAIN, _VAL, _BASELINE = "#4c78a8", "#e45756", "#666666"


def save_loss_plot(path: Path, train: list[float], val: list[tuple[int, float]], baselines: Baselines) -> None:
    """Draw training and validation loss by step, with the baselines as horizontal lines."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, len(train) + 1)
    axes.plot(steps, train, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smoothed(train), color=_TRAIN, label="training, smoothed")
    axes.plot(*zip(*val, strict=True), "o-", color=_VAL, label="validation", clip_on=False)
    _draw_baseline(axes, baselines.byte_frequency, "byte frequencies")
    _draw_baseline(axes, baselines.bigram, "bigram table")
    # The first steps start at log(256) = 5.5; what matters lies between the baselines and the end.
    axes.set(xlabel="step", ylabel="nats per byte", xlim=(0, len(train)), ylim=(None, 4.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=150)


def _draw_baseline(axes: Axes, loss: float, name: str) -> None:
    axes.axhline(loss, color=_BASELINE, linestyle="--", linewidth=1)
    right_end = axes.get_yaxis_transform()  # x as a fraction of the axes, y as data
    axes.text(1, loss, f"{name} {loss:.2f}", transform=right_end, ha="right", va="bottom", color=_BASELINE)


def _smoothed(losses: list[float]) -> list[float]:
    """Running average that forgets with a time constant of about 20 steps, without bias at the start."""
    average, weight, result = 0.0, 0.0, []
    for loss in losses:
        average, weight = 0.95 * average + 0.05 * loss, 0.95 * weight + 0.05
        result.append(average / weight)
    return result
