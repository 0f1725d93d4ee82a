"""Register the strategy names with Lightning without importing it: that takes seconds, and engine users need none."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_strategy.strategy import FullyShardedStrategy

_REGISTRY_MODULE = "lightning.pytorch.strategies"
START_METHODS = {
    "fully_sharded": "popen",
    "fully_sharded_spawn": "spawn",
    "fully_sharded_fork": "fork",
    "fully_sharded_notebook": "fork",
}


def _make_strategy(**init_args: Any) -> FullyShardedStrategy:
    from fsdp_strategy.strategy import FullyShardedStrategy

    return FullyShardedStrategy(**init_args)


def _register(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    for name, start_method in START_METHODS.items():
        if name not in registry:
            description = f"Sharded training, ranks started by {start_method}"
            registry.register(name, _make_strategy, description=description, start_method=start_method)


class _RegisteringLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)


class _RegisterOnImport(MetaPathFinder):
    """Finds Lightning's strategies once, with a loader that registers ours behind them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


def register_strategies() -> None:
    """Register now if Lightning is imported, else as soon as it is."""
    if _REGISTRY_MODULE in sys.modules:
        _register(sys.modules[_REGISTRY_MODULE])
    elif not any(isinstance(finder, _RegisterOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnImport())
