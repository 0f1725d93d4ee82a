"""Where the compute of a unit stands between its hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp_strategy.engine.unit import Unit


def in_backward() -> bool:
    """Whether autograd is running on this thread; a forward then is a recomputation of activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_in(getattr(value, f.name, None))


class UnitFlow:
    """Where the compute of one unit stands: its calls in forward, what has passed in backward."""

    __slots__ = (
        "__weakref__",
        "depth",
        "in_backward",
        "is_reduced",
        "keep",
        "keep_between",
        "num_arrived",
        "num_calls",
        "num_passed",
        "unit",
    )

    def __init__(self, unit: Unit, *, keep_between: bool = False) -> None:
        self.unit = unit
        self.keep_between = keep_between  # stays unsharded from forward to backward
        self.depth = 0  # nested calls of the module
        self.keep = unit.is_root  # stays unsharded until the round ends
        self.num_calls = 0  # forward calls that a backward will pass
        self.reset()

    def reset(self) -> None:
        """Ready for the next backward."""
        self.in_backward = False
        self.num_arrived = 0  # gradients accumulated since the last reduction
        self.num_passed = 0
        self.is_reduced = False

    def forget_calls(self) -> None:
        """The graph is gone: ready for the next forward."""
        self.depth = self.num_calls = 0
        self.keep = self.unit.is_root
        self.reset()
