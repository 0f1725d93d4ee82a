"""Sharded training for Lightning: `Trainer(strategy="fully_sharded")`. Importing this package registers the names."""

from lightning.pytorch.strategies import StrategyRegistry

from fsdp_strategy._version import __version__
from fsdp_strategy.strategy import FullyShardedStrategy

__all__ = ["FullyShardedStrategy", "__version__"]


def _register_strategies() -> None:
    for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
        name = f"fully_sharded{suffix}"
        if name not in StrategyRegistry:
            StrategyRegistry.register(
                name,
                FullyShardedStrategy,
                description=f"Sharded training, ranks started by {start_method}",
                start_method=start_method,
            )


_register_strategies()
