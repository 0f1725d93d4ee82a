"""The FSDP engine, torch only: usable without Lightning."""

from fsdp_strategy.engine.engine import EngineConfig, FullyShardedEngine
from fsdp_strategy.engine.full_params import find_engine, restore, unshard
from fsdp_strategy.engine.mesh import ShardMesh
from fsdp_strategy.engine.optimizer import LocalStep
from fsdp_strategy.engine.recorder import Event, Recorder
from fsdp_strategy.engine.unit import Unit, UnitState
from fsdp_strategy.engine.units import find_units

__all__ = [
    "EngineConfig",
    "Event",
    "FullyShardedEngine",
    "LocalStep",
    "Recorder",
    "ShardMesh",
    "Unit",
    "UnitState",
    "find_engine",
    "find_units",
    "restore",
    "unshard",
]
