"""Train a tiny model by the name of a strategy: one script for every way of starting the ranks.

    python tests/launch_script.py NAME DIRECTORY

Leaves `trained.ckpt` and, where the parent gets the model back, `parent.pt` with its state dictionary and the seconds
that the fit took.
"""

import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import fsdp_strategy  # noqa: F401 - registers the names
from tests.models import loader, seeded


def train(name: str, directory: Path) -> None:
    model = seeded()
    start = time.monotonic()
    trainer = pl.Trainer(
        strategy=name,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[ModelCheckpoint(dirpath=directory, filename="trained")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(24, 2))
    if name.endswith(("_fork", "_spawn")):
        seconds = time.monotonic() - start
        torch.save({"state_dict": model.state_dict(), "seconds": seconds}, directory / "parent.pt")


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
