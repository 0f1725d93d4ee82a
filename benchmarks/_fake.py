"""One rank of many that are not there: torch's fake process group, whose collectives return at once.

What would come from other ranks is whatever the memory holds. It must not slow arithmetic down as denormal numbers do,
and losses say nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_strategy.engine import collectives


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of `world_size`."""
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class DoneWork:
    """Of a collective that has nothing to do."""

    def wait(self) -> bool:
        """Return at once."""
        return True


@contextmanager
def empty_collectives() -> Iterator[None]:
    """Inside the block the engine's native gathers and reductions do nothing.

    The fake group copies as many pieces as there are ranks: 5 ms for a gather among 4096, whatever its size.
    """
    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    natives = {getattr(dist, name, None) for name in names} - {None}
    replaced = {name: value for name, value in vars(collectives).items() if callable(value) and value in natives}
    assert replaced, "the engine calls its native collectives by other names"

    def do_nothing(*args: Any, **kwargs: Any) -> DoneWork:
        return DoneWork()

    for name in replaced:
        setattr(collectives, name, do_nothing)
    try:
        yield
    finally:
        for name, value in replaced.items():
            setattr(collectives, name, value)
