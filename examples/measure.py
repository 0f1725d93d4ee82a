"""Callbacks that watch a run: the loss curve, the throughput, the bytes sent and the memory used.

Each works with every strategy. Figures that only the sharded strategy's recorder can give are `None` elsewhere, and the
report then shows the formula alone.
"""

import resource
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor

_RECORDED_STEP = 3  # the schedule of gathers is learnt in the first step, so an early one would not be typical


class ProgressBar(TQDMProgressBar):
    """Training bar with readable figures."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=10)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Losses with three decimals, tokens per second in whole numbers."""
        metrics = super().get_metrics(trainer, pl_module)
        return {name: f"{value:,.0f}" if name == "tokens/s" else f"{value:.3f}" for name, value in metrics.items()}

    def init_validation_tqdm(self) -> Tqdm:
        """A validation takes a second: a bar of its own would only flicker."""
        return Tqdm(disable=True)


@dataclass(slots=True)
class Curve:
    """Losses in nats a byte, by the number of steps done."""

    train: list[Tensor] = field(default_factory=list)  # 0-d each, of this rank's batches
    val: list[tuple[int, float]] = field(default_factory=list)  # mean over all ranks


class History(L.Callback):
    """Keeps the loss curve and the pace, and logs the tokens that all ranks train on per second."""

    def __init__(self) -> None:
        self.curve = Curve()
        self.num_tokens, self.train_seconds, self.fit_seconds = 0, 0.0, 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)

    @property
    def tokens_per_second(self) -> float:
        """Over the whole run, without validation."""
        return self.num_tokens / max(self.train_seconds, 1e-9)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start both clocks."""
        self._start = self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; from mark to mark, so that loading the data counts too."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        num_tokens = batch[0].numel() * trainer.world_size
        self.num_tokens, self.train_seconds = self.num_tokens + num_tokens, self.train_seconds + seconds
        self._recent.append((num_tokens, seconds))
        self.curve.train.append(outputs["loss"].detach())
        recent_tokens, recent_seconds = map(sum, zip(*self._recent, strict=True))
        pl_module.log("tokens/s", recent_tokens / recent_seconds, prog_bar=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the validation loss, and leave the time it took out of the pace."""
        self.curve.val.append((trainer.global_step, trainer.callback_metrics["val_loss"].item()))
        self._mark = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self.fit_seconds = time.perf_counter() - self._start


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Outgoing elements and bytes of one kind of collective."""

    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What all ranks together send in one training step; what no recorder has measured is None."""

    formula: str
    formula_numel: int
    measured: dict[str, Sent] | None = None  # "gathered" and "reduced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank; what is not measured is None."""

    peak_rss_nbytes: int  # of the process: Python, torch, the text and everything else
    device_peak_nbytes: int | None  # what torch allocated on the accelerator
    moments_nbytes: int  # of AdamW, at the end
    engine_peak_nbytes: int | None  # parameters, gradients and buffers when their sum was highest
    category_peak_nbytes: dict[str, int] | None  # each category when it was highest itself

    @property
    def working_set_nbytes(self) -> int | None:
        """What the engine held at its peak besides the shards."""
        if self.engine_peak_nbytes is None or self.category_peak_nbytes is None:
            return None
        shards = self.category_peak_nbytes["sharded_param"] + self.category_peak_nbytes["sharded_grad"]
        return self.engine_peak_nbytes - shards

    @property
    def total_nbytes(self) -> int | None:
        """Parameters, gradients, buffers and moments at the peak."""
        return None if self.engine_peak_nbytes is None else self.engine_peak_nbytes + self.moments_nbytes


class Accountant(L.Callback):
    """Records one training step with the sharded strategy's recorder, and reads every rank's memory at the end."""

    def __init__(self) -> None:
        self.num_params, self.param_itemsize = 0, 0
        self.num_root_params: int | None = None  # only the sharded strategy has a root unit
        self.traffic: Traffic | None = None
        self.memory_of_rank: list[Memory] = []
        self._recorder: Any = None
        self._recording = ExitStack()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Count the parameters while every rank still has them whole."""
        self.num_params = sum(parameter.numel() for parameter in pl_module.parameters())

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Open the recorder for one step."""
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None and batch_idx == _RECORDED_STEP:
            self._recorder = self._recording.enter_context(engine.record())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close it; in every other step there is nothing to close."""
        self._recording.close()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Bring together what each rank has measured."""
        self.param_itemsize = next(pl_module.parameters()).element_size()
        self.traffic = self._measure_traffic(trainer, pl_module.device)
        self.memory_of_rank = self._measure_memory(trainer, pl_module.device)

    def _measure_traffic(self, trainer: L.Trainer, device: torch.device) -> Traffic:
        engine, num_params = getattr(trainer.strategy, "engine", None), self.num_params
        if engine is None:
            # Of a ring all-reduce: every rank sends on each gradient twice, but for an N-th. Nothing here counts it.
            return Traffic(formula="2 (N-1) P", formula_numel=2 * (trainer.world_size - 1) * num_params)
        self.num_root_params = engine.root_unit.numel if engine.root_unit is not None else 0
        # Every parameter is gathered twice and its gradient reduced once, but the root unit stays gathered in between.
        numel = (engine.shard_world_size - 1) * (3 * num_params - self.num_root_params)
        measured = self._recorder and {
            "gathered": self._sent_by_all_ranks(trainer, device, "all_gather"),
            "reduced": self._sent_by_all_ranks(trainer, device, "reduce_scatter"),
        }
        return Traffic(formula="(N-1) (3 P - P_root)", formula_numel=numel, measured=measured)

    def _sent_by_all_ranks(self, trainer: L.Trainer, device: torch.device, collective: str) -> Sent:
        own = [self._recorder.sent_numel(collective), self._recorder.sent_nbytes(collective)]
        numels, nbytes = zip(*_from_all_ranks(trainer, device, own), strict=True)
        return Sent(numel=sum(numels), nbytes=sum(nbytes))

    def _measure_memory(self, trainer: L.Trainer, device: torch.device) -> list[Memory]:
        on_cuda, recorder = device.type == "cuda", self._recorder
        own = [
            _peak_rss_nbytes(),
            torch.cuda.max_memory_allocated(device) if on_cuda else 0,
            _moments_nbytes(trainer.optimizers[0]),
        ]
        categories = sorted(recorder.peak_nbytes) if recorder is not None else []
        if recorder is not None:
            own += [recorder.peak_total_nbytes, *(recorder.peak_nbytes[category] for category in categories)]
        return [
            Memory(
                peak_rss_nbytes=rss,
                device_peak_nbytes=device_peak if on_cuda else None,
                moments_nbytes=moments,
                engine_peak_nbytes=peaks[0] if peaks else None,
                category_peak_nbytes=dict(zip(categories, peaks[1:], strict=True)) if peaks else None,
            )
            for rss, device_peak, moments, *peaks in _from_all_ranks(trainer, device, own)
        ]


def _from_all_ranks(trainer: L.Trainer, device: torch.device, own: list[int]) -> list[list[int]]:
    """Every rank's figures, on every rank: each writes its own row, and the rows are added up."""
    rows = torch.zeros(trainer.world_size, len(own), dtype=torch.int64, device=device)
    rows[trainer.global_rank] = torch.tensor(own)
    return trainer.strategy.reduce(rows, reduce_op="sum").tolist()


def _moments_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's first and second moments."""
    states = optimizer.state.values()
    return sum(_local(state[key]).nbytes for state in states for key in ("exp_avg", "exp_avg_sq"))


def _local(tensor: Any) -> Tensor:
    """This rank's piece of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _peak_rss_nbytes() -> int:
    """Most memory this process has had resident. Linux counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
