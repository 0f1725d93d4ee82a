"""Sharded training for Lightning: `Trainer(strategy="fully_sharded")`.

Importing this package registers the names `fully_sharded`, `fully_sharded_spawn` and `fully_sharded_fork`.
"""

from typing import TYPE_CHECKING, Any

from fsdp_strategy._registration import register_strategies
from fsdp_strategy._version import __version__

if TYPE_CHECKING:
    from fsdp_strategy.strategy import FullyShardedStrategy

__all__ = ["FullyShardedStrategy", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what needs Lightning when it is first asked for."""
    if name == "FullyShardedStrategy":
        from fsdp_strategy.strategy import FullyShardedStrategy

        return FullyShardedStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_strategies()
