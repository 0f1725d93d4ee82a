"""Sharded training for Lightning: `Trainer(strategy="fully_sharded")`.

Importing this package registers the names `fully_sharded`, `fully_sharded_spawn` and `fully_sharded_fork`.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fsdp_strategy._registration import register_strategies
from fsdp_strategy._version import __version__

if TYPE_CHECKING:
    import torch.nn as nn

    from fsdp_strategy.strategy import FullyShardedStrategy

__all__ = ["FullyShardedStrategy", "__version__", "unshard"]


def unshard(
    module_or_strategy: "nn.Module | FullyShardedStrategy", *, write: bool = False
) -> AbstractContextManager[None]:
    """Inside the block, a sharded module shows whole parameters, to read or, with `write=True`, to edit.

    All ranks must enter the block; rank 0's edits are kept. See `fsdp_strategy.engine.unshard`.

    Args:
        module_or_strategy: a sharded module, a part of one, or the strategy that shards it.
        write: shard the edited parameters at the end of the block.
    """
    from fsdp_strategy.engine import unshard as unshard_module

    engine = getattr(module_or_strategy, "engine", None)
    module = module_or_strategy if engine is None else engine.module
    return unshard_module(module, write=write)  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    """Import what needs Lightning when it is first asked for."""
    if name == "FullyShardedStrategy":
        from fsdp_strategy.strategy import FullyShardedStrategy

        return FullyShardedStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_strategies()
