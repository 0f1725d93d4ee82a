"""Checkpoints of a sharded model, torch only."""

from fsdp_strategy.checkpoint.full import (
    full_optimizer_state_dict,
    full_state_dict,
    gather_sharded,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)

__all__ = [
    "full_optimizer_state_dict",
    "full_state_dict",
    "gather_sharded",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
]
