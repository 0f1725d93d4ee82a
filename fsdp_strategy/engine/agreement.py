"""Compare between ranks, at setup, what must be equal on all of them. Every rank raises, or none.

A rank that finds a mistake of its own tells the others before it raises, so that nobody waits for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from fsdp_strategy.engine.collectives import Collectives
from fsdp_strategy.engine.sharded_tensor import ShardedTensor
from fsdp_strategy.engine.units import UnitPlan

T = TypeVar("T")


def describe(plans: Sequence[UnitPlan]) -> list[str]:
    """One line per parameter: all that decides which messages are sent and how large they are."""
    return [
        f"`{site.fqn}` {tuple(site.param.shape)} {site.param.dtype}{'' if site.param.requires_grad else ' frozen'} in "
        + (f"unit `{plan.fqn}`" if plan.fqn else "the root unit")
        for plan in plans
        for site in plan.params
    ]


def check_not_lazy(module: nn.Module) -> None:
    """Raise on a parameter that has no shape yet.

    Raises:
        ValueError: for uninitialised lazy parameters.
    """
    lazy = [fqn for fqn, param in module.named_parameters() if isinstance(param, UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"Expected initialised parameters, got {len(lazy)} lazy ones, first `{lazy[0]}`. Run one forward on a "
            "batch before training starts, so that their shapes are known."
        )


def check_params(plans: Sequence[UnitPlan]) -> None:
    """Raise on a parameter that cannot be sharded.

    Raises:
        ValueError: for boolean parameters, and those that are sharded already.
    """
    for plan in plans:
        for site in plan.params:
            if isinstance(site.param, ShardedTensor):
                raise ValueError(
                    f"Expected a module that is not sharded, got one with `{site.fqn}`, which is already sharded. Undo "
                    "that with `fsdp_strategy.engine.restore`, or use the engine that there is."
                )
            if isinstance(site.param, DTensor):
                raise ValueError(
                    f"Expected plain parameters, got `{site.fqn}`, which is a DTensor. Leave the sharding to the "
                    "strategy: build the module without distributing it."
                )
            if site.param.dtype == torch.bool:
                raise ValueError(
                    f"Expected numeric parameters, got `{site.fqn}` of torch.bool. Register it as a buffer."
                )


def run_on_all_or_none(collectives: Collectives, check: Callable[[], T], what: str) -> T:
    """Run `check` on every rank; if it raises on any, raise on all, naming the ranks.

    Raises:
        ValueError: with each failing rank's message, also on the ranks on which `check` passed.
    """
    result: T | None = None
    problem: Exception | None = None
    try:
        result = check()
    except (ValueError, TypeError) as error:
        problem = error
    problems = collectives.exchange_objects(None if problem is None else f"{problem}")
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if not failed:
        return result  # type: ignore[return-value]
    ranks = "every rank" if len(failed) == len(problems) else f"rank {', '.join(map(str, failed))}"
    raise ValueError(f"[{ranks}] {what}: {problems[failed[0]]}") from problem


def check_equal_models(collectives: Collectives, plans: Sequence[UnitPlan]) -> None:
    """Raise on every rank if the ranks built different models.

    Raises:
        ValueError: naming the ranks that differ from rank 0 and the first difference.
    """
    lines = describe(plans)
    digests = collectives.exchange_objects(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    models = collectives.exchange_objects(lines)
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    other = models[differing[0]]
    nothing = "no further parameter"
    first, second = next(
        (models[0][i] if i < len(models[0]) else nothing, other[i] if i < len(other) else nothing)
        for i in range(max(len(models[0]), len(other)))
        if models[0][i : i + 1] != other[i : i + 1]
    )
    raise ValueError(
        f"Expected the same model on every rank, got a different one on rank {', '.join(map(str, differing))}: rank 0 "
        f"has {first}, rank {differing[0]} has {second}. Build the model from the same configuration on every rank."
    )
