"""What every script needs around its measurement: arguments, spreads, a Markdown table, a JSON file, a chart."""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# Contenders that average gradients compute the same losses. float32 sums in another order may differ in the last place.
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
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f} [{self.q1:.{digits}f}–{self.q3:.{digits}f}]"


def make_parser(doc: str | None, script: str) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the script, with `--out`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(f"runs/bench/{script}.json"), help="the JSON file")
    return parser


def say(text: str) -> None:
    """A line of progress, at once."""
    print(text, flush=True)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; None is a dash."""
    lines = [header, ["---"] * len(header)]
    lines += [["–" if cell is None else str(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def max_difference(losses: Iterable[Sequence[float]]) -> float:
    """The largest relative difference between series of losses that should be equal; 0 for fewer than two."""
    first, *others = list(losses) or [[]]
    return max(
        (abs(a - b) / max(abs(a), abs(b), 1e-30) for other in others for a, b in zip(first, other, strict=True)),
        default=0.0,
    )


def loss_verdict(losses: Mapping[str, Sequence[float]]) -> tuple[bool, str]:
    """Whether contenders that should compute the same losses did, and a line that says so."""
    difference = max_difference(losses.values())
    agree = difference <= LOSS_TOLERANCE
    word = "agree" if agree else "DO NOT AGREE"
    return agree, f"Losses of {', '.join(losses)} {word}: largest relative difference {difference:.1e}."


def command_line() -> str:
    """As typed, without the path of the interpreter."""
    return shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])


def environment(backend: str = "gloo") -> dict[str, Any]:
    """What the figures depend on besides the command."""
    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
        "threads_per_rank": torch.get_num_threads(),
        "backend": backend,
    }
    with suppress(PackageNotFoundError):
        found["lightning"] = version("lightning")
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def write_json(path: Path, report: Mapping[str, Any], *, backend: str = "gloo") -> None:
    """The report, headed by the command and the environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": command_line(), "environment": environment(backend), **report}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    say(f"Written: {path}")


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files; None where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        say("No chart: matplotlib is not installed.")
        return None
    mpl.use("Agg")
    mpl.set_loglevel("error")  # a first run tells about its font cache
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, out: Path) -> None:
    """As a PNG beside the JSON file `out`."""
    path = out.with_suffix(".png")
    figure.savefig(path, dpi=120)
    pyplot().close(figure)
    say(f"Written: {path}")
