"""Text for the example: the source files of Python's own standard library, which every machine has.

Files are read at run time, in an order that depends on their names alone, and every file goes either to training or to
validation. The two baselines that any model has to beat are here too: byte frequencies, and the table of byte pairs.
"""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

NUM_BYTE_VALUES = 256
_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TEXT_NBYTES_CAP = 12_000_000
_VAL_FRACTION = 0.1
_NUM_VAL_WINDOWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The bytes of the training files and of the validation files, one after the other."""

    train: Tensor  # (num_train_bytes,) uint8
    val: Tensor  # (num_val_bytes,) uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """What knowing only frequencies reaches on the validation text, in nats a byte."""

    byte_frequency: float
    bigram: float


def read_text() -> Text:
    """Read the standard library's sources, capped, and split them by file."""
    paths = _source_paths()
    val, rest = _take(paths, int(_TEXT_NBYTES_CAP * _VAL_FRACTION), fraction=_VAL_FRACTION)
    train, _ = _take(rest, _TEXT_NBYTES_CAP - len(val))
    return Text(train=torch.frombuffer(train, dtype=torch.uint8), val=torch.frombuffer(val, dtype=torch.uint8))


def _source_paths() -> list[Path]:
    """All source files outside tests and installed packages, in one fixed shuffled order."""
    root = Path(sysconfig.get_path("stdlib"))
    relative = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = sorted(path for path in relative if _EXCLUDED_FOLDERS.isdisjoint(path.parts))
    # Neighbours in the alphabet resemble each other (`encodings` alone is 120 tables): a cut of the sorted list would
    # give training and validation different kinds of text.
    random.Random(0).shuffle(kept)
    return [root / path for path in kept]


def _take(paths: list[Path], nbytes: int, *, fraction: float = 1.0) -> tuple[bytearray, list[Path]]:
    """Contents of the leading files, up to `nbytes` and that fraction of the files, and the paths left over."""
    limit = max(1, int(len(paths) * fraction))
    content, num_taken = bytearray(), 0
    while num_taken < limit and len(content) < nbytes:
        content += paths[num_taken].read_bytes()
        num_taken += 1
    return content, paths[num_taken:]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text at given starts; the target is the window moved on by one byte."""

    def __init__(self, text: Tensor, starts: Tensor, context: int) -> None:
        self._text, self._starts, self._context = text, starts.tolist(), context

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self._starts[index]
        window = self._text[start : start + self._context + 1].long()
        return window[:-1], window[1:]  # (context,) int64 each


class StdlibText(L.LightningDataModule):
    """Random windows of the training text, evenly spaced windows of the validation text.

    Args:
        context: Bytes in a window.
        batch_size: Windows in a batch of one rank.
        num_steps: Steps of one epoch: the training set has exactly as many windows as all ranks need for them.
        seed: Of the window starts.
    """

    def __init__(self, *, context: int, batch_size: int, num_steps: int, seed: int) -> None:
        super().__init__()
        self.context, self.batch_size, self.num_steps, self.seed = context, batch_size, num_steps, seed
        self.text: Text | None = None

    def setup(self, stage: str) -> None:
        """Read the text, on every rank: it is a few megabytes."""
        self.text = self.text or read_text()

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Lightning gives every rank its own part of the windows, by a `DistributedSampler`."""
        assert self.text is not None
        assert self.trainer is not None
        num_windows = self.num_steps * self.batch_size * self.trainer.world_size
        generator = torch.Generator().manual_seed(self.seed)
        starts = torch.randint(len(self.text.train) - self.context, (num_windows,), generator=generator)
        # The starts are random already; without a shuffle the order is the same on every machine.
        return DataLoader(Windows(self.text.train, starts, self.context), self.batch_size)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The same windows for every seed and number of ranks, but for those repeated to give all ranks as many."""
        return DataLoader(self._val_windows(), self.batch_size)

    def baselines(self) -> Baselines:
        """Fit both tables on the training text and score them on the bytes that the model is validated on."""
        assert self.text is not None
        windows = self._val_windows()
        pairs = [windows[index] for index in range(len(windows))]
        inputs, targets = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        return fit_baselines(self.text.train.long(), inputs, targets)

    def _val_windows(self) -> Windows:
        assert self.text is not None
        last_start = len(self.text.val) - self.context - 1
        starts = torch.linspace(0, last_start, _NUM_VAL_WINDOWS).long()
        return Windows(self.text.val, starts, self.context)


def fit_baselines(train: Tensor, inputs: Tensor, targets: Tensor) -> Baselines:
    """Mean negative log likelihood of `targets`, from frequencies in `train`, without and with the byte before.

    Args:
        train: (num_train_bytes,) int64, the text that is counted.
        inputs: (num_bytes,) int64, the byte before each target.
        targets: (num_bytes,) int64, the bytes to predict.
    """
    pairs = torch.bincount(train[:-1] * NUM_BYTE_VALUES + train[1:], minlength=NUM_BYTE_VALUES**2)
    pair_counts = pairs.view(NUM_BYTE_VALUES, NUM_BYTE_VALUES).double()
    frequency = pair_counts.sum(0) + 1
    frequency /= frequency.sum()
    # One extra observation a row, spread as the frequencies are, so that no pair has probability zero.
    conditional = (pair_counts + frequency) / (pair_counts.sum(1, keepdim=True) + 1)
    return Baselines(
        byte_frequency=-frequency[targets].log().mean().item(),
        bigram=-conditional[inputs, targets].log().mean().item(),
    )
