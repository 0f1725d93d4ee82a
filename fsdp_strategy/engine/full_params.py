"""Whole parameters for a moment: to read them, or to edit them and have the edits sharded again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fsdp_strategy.engine.engine import FullyShardedEngine
from fsdp_strategy.engine.unit import UnitParam


def find_engine(module: nn.Module) -> FullyShardedEngine:
    """The engine that shards `module` or the model around it.

    Raises:
        ValueError: if there is none.
    """
    for engine in FullyShardedEngine.live():
        if any(child is module for child in engine.module.modules()):
            return engine
    raise ValueError(
        f"Expected a sharded module, got {type(module).__name__}, which no engine shards. Call this after the Trainer "
        "has set the strategy up, for example in on_fit_start or later."
    )


def _gather(engine: FullyShardedEngine, param: UnitParam) -> Tensor:
    """The whole parameter in its own dtype, on every rank."""
    return engine.mesh.collectives.gather_param(param.cut, param.local)


def _write_back(engine: FullyShardedEngine, param: UnitParam, full: Tensor) -> None:
    engine.mesh.collectives.broadcast(full)
    param.sharded.keep(full)


@torch.no_grad()
def restore(engine: FullyShardedEngine) -> None:
    """Undo the sharding: the module has whole plain parameters again and is called without the engine. Collective.

    Raises:
        RuntimeError: if the process group that the parameters were sharded over is gone.
    """
    if not engine.mesh.is_alive:
        raise RuntimeError(
            f"Expected the process group over which {type(engine.module).__name__} was sharded, got a new one. Its "
            "parameters lie on ranks that can no longer be reached: load them from a checkpoint into a new module."
        )
    engine.end()
    for param in engine.params:
        whole = nn.Parameter(_gather(engine, param), requires_grad=param.sharded.requires_grad)
        for owner, name in param.sites:
            owner._parameters[name] = whole
    engine.forget_module()


@contextmanager
def unshard(module: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Inside the block, `module` and its submodules show whole plain parameters in their own dtype. Collective.

    Modules may be called inside the block; what autograd records there gives no sharded gradients.

    Args:
        module: a sharded module, or a part of one. All ranks must enter the block.
        write: shard the parameters again from rank 0's values at the end. Otherwise edits are dropped, with a warning.

    Raises:
        ValueError: if the module is not sharded.
    """
    engine = find_engine(module)
    wanted = {id(child) for child in module.modules()}
    params = [param for param in engine.params if any(id(owner) in wanted for owner, _ in param.sites)]
    with torch.no_grad():
        fulls = [nn.Parameter(_gather(engine, p), requires_grad=p.sharded.requires_grad) for p in params]
    shown = [(owner._parameters, name) for p in params for owner, name in p.sites]
    before = [parameters[name] for parameters, name in shown]
    versions = [full._version for full in fulls]
    for param, full in zip(params, fulls, strict=True):
        for owner, name in param.sites:
            owner._parameters[name] = full
    try:
        with engine.suspended():
            yield
    finally:
        for (parameters, name), value in zip(shown, before, strict=True):
            parameters[name] = value
    edited = [p.fqn for p, full, version in zip(params, fulls, versions, strict=True) if full._version != version]
    if write:
        with torch.no_grad():
            for param, full in zip(params, fulls, strict=True):
                _write_back(engine, param, full)
    elif edited:
        warnings.warn(
            f"Edits of {len(edited)} unsharded parameters, first `{edited[0]}`, are dropped. Pass write=True to keep "
            "them.",
            stacklevel=3,
        )
