"""Train a byte-level GPT on the sources of Python's standard library, fully sharded.

    python examples/train_gpt.py                        # all GPUs, or two CPU ranks: two to three minutes on two cores
    python examples/train_gpt.py --strategy ddp_fork    # the same model, not sharded
    torchrun --nproc-per-node 2 examples/train_gpt.py --strategy fully_sharded --devices 2

The model (`gpt.py`) is an ordinary LightningModule; only the name of the strategy asks for sharding. The run ends with
the validation loss beside two baselines, a sample of what the model writes, what the ranks sent to each other and how
much memory they needed. All figures go to `report.json`, the loss curve to `loss.png`.
"""

import argparse
import logging
import warnings
from pathlib import Path

import lightning as L
import torch
from gpt import SIZES, LitGPT
from measure import Accountant, History, ProgressBar
from report import Report
from stdlib_text import StdlibText

_MAX_NUM_VALIDATIONS = 8


class RankSetup(L.Callback):
    """Settings of the process that every rank needs, also a spawned one, which does not come through `main`."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Runs on each rank before anything else."""
        set_up_process()


def set_up_process() -> None:
    """One thread for a CPU rank, and no messages but our own."""
    # A matrix product of this model is too small to share among threads, and the ranks would take each other's cores.
    # Also, a forked rank must not inherit a thread pool, which is why `main` calls this before anything else.
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # The text is in memory and a batch takes a millisecond to cut: workers would only take cores from the ranks.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # Lightning's own use of a deprecated torch function


def parse_args() -> argparse.Namespace:
    """The command line; what depends on the machine is decided here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", help="name of a strategy; default fully_sharded on GPUs, else fully_sharded_fork")
    parser.add_argument("--devices", type=int, help="number of ranks; default all GPUs, else 2")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16, help="windows in a batch of one rank")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="directory for report.json and loss.png")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args()
    if args.accelerator == "auto":
        args.accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    on_gpu = args.accelerator in ("gpu", "cuda")
    args.devices = args.devices or (torch.cuda.device_count() if on_gpu else 2)
    # A process that has touched a GPU cannot be forked.
    args.strategy = args.strategy or ("fully_sharded" if on_gpu else "fully_sharded_fork")
    return args


def build_trainer(args: argparse.Namespace) -> L.Trainer:
    """The Trainer: nothing in it but the strategy's name has to do with sharding."""
    history, accountant = History(), Accountant()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    report = Report(history, accountant, settings=settings, out=args.out, plot=not args.no_plot)
    # Evenly spaced validations, the last of them after the last step.
    num_validations = next(n for n in range(_MAX_NUM_VALIDATIONS, 0, -1) if args.steps % n == 0)
    return L.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision,
        max_epochs=1,
        max_steps=args.steps,
        val_check_interval=args.steps // num_validations,
        num_sanity_val_steps=0,
        callbacks=[RankSetup(), ProgressBar(), history, accountant, report],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def main() -> None:
    """Read the command line, train, report."""
    set_up_process()
    args = parse_args()
    if args.strategy.startswith("fully_sharded"):
        import fsdp_strategy  # noqa: F401  (importing it registers the names of its strategies with Lightning)
    L.seed_everything(args.seed)
    config = SIZES[args.size]
    data = StdlibText(context=config.context, batch_size=args.batch_size, num_steps=args.steps, seed=args.seed)
    build_trainer(args).fit(LitGPT(config), data)


if __name__ == "__main__":
    main()
