"""The same GPT from the command line: `python examples/cli.py fit --config examples/gpt.yaml`.

Every argument of the strategy can be set in the file or on the command line:

    python examples/cli.py fit --config examples/gpt.yaml --trainer.strategy.init_args.prefetch_limit=2
    python examples/cli.py fit --trainer.strategy.help=fsdp_strategy.FullyShardedStrategy
"""

from gpt import LitGPT
from lightning.pytorch.cli import LightningCLI
from stdlib_text import StdlibText

if __name__ == "__main__":
    LightningCLI(LitGPT, StdlibText, save_config_callback=None, seed_everything_default=0)
