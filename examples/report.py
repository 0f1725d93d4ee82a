"""What the run shows for itself at the end: a text, a JSON file and a picture of the loss curve."""

import importlib.util
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from gpt import LitGPT
from measure import Accountant, History
from report_text import loss_lines, memory_lines, sample_lines, traffic_lines
from stdlib_text import Baselines, StdlibText

_PROMPT = b"import os\n\n\ndef "
_SAMPLE_NBYTES = 400


class Report(L.Callback):
    """Prints the report on rank 0 and writes its files.

    It runs inside the fit: only there does every rank still hold the trained weights in working order, however the
    ranks were launched. Must stand after `history` and `accountant` among the callbacks.

    Args:
        history: Supplies the loss curve and the pace.
        accountant: Supplies the bytes sent and the memory.
        settings: What the user chose, for the JSON file.
        out: Directory for the files.
        plot: Whether to draw the loss curve.
    """

    def __init__(
        self, history: History, accountant: Accountant, *, settings: dict[str, Any], out: Path, plot: bool
    ) -> None:
        self._history, self._accountant = history, accountant
        self._settings, self._out, self._plot = settings, out, plot

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say on rank 0 what is about to run."""
        if trainer.is_global_zero:
            model = f"GPT with {self._accountant.num_params:,} parameters, {trainer.max_steps} steps"
            strategy, accelerator = self._settings["strategy"], self._settings["accelerator"]
            print(f"{model}, strategy {strategy}, ranks: {trainer.world_size} ({accelerator}).", flush=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sample on all ranks, since a sharded forward needs them all; report on one."""
        assert isinstance(pl_module, LitGPT)
        pl_module.eval()
        with trainer.precision_plugin.forward_context():
            sample = pl_module.generate(_PROMPT, _SAMPLE_NBYTES, temperature=0.8, seed=0)
        if trainer.is_global_zero:
            self._publish(trainer, sample.decode(errors="replace"))

    def _publish(self, trainer: L.Trainer, sample: str) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, StdlibText)
        baselines = data.baselines()
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val_")}
        for lines in (
            loss_lines(metrics, baselines),
            traffic_lines(self._accountant, trainer.world_size),
            memory_lines(self._accountant),
            sample_lines(sample),
            self._write_files(trainer, metrics, baselines, sample),
        ):
            print("", *lines, sep="\n", flush=True)

    def _write_files(
        self, trainer: L.Trainer, metrics: dict[str, float], baselines: Baselines, sample: str
    ) -> list[str]:
        self._out.mkdir(parents=True, exist_ok=True)
        train_losses = [loss.item() for loss in self._history.curve.train]
        figures = self._run_figures(trainer) | {
            "validation": metrics,
            "baselines": asdict(baselines),
            "curve": {"train": train_losses, "val": self._history.curve.val},
            "sample": sample,
        }
        written = [self._out / "report.json"]
        written[0].write_text(json.dumps(figures, indent=1) + "\n")
        # matplotlib is only needed for the picture, and takes a second to import.
        if self._plot and importlib.util.find_spec("matplotlib"):
            from loss_plot import save_loss_plot

            written.append(self._out / "loss.png")
            save_loss_plot(written[-1], train_losses, self._history.curve.val, baselines)
        return [_pace_line(self._history), f"Written: {', '.join(map(str, written))}"]

    def _run_figures(self, trainer: L.Trainer) -> dict[str, Any]:
        history, accountant = self._history, self._accountant
        assert accountant.traffic is not None
        return {
            "settings": self._settings,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__},
            "num_ranks": trainer.world_size,
            "num_params": accountant.num_params,
            "num_root_params": accountant.num_root_params,
            "num_tokens": history.num_tokens,
            "fit_seconds": history.fit_seconds,
            "tokens_per_second": history.tokens_per_second,
            "traffic_of_a_step": asdict(accountant.traffic),
            "memory_of_each_rank": [asdict(memory) for memory in accountant.memory_of_rank],
        }


def _pace_line(history: History) -> str:
    return (
        f"Trained on {history.num_tokens:,} tokens in {history.fit_seconds:.0f} s, validation included: "
        f"{history.tokens_per_second:,.0f} tokens/s over all ranks."
    )
