"""Full checkpoints: plain tensors under the names of the unsharded model, as a single device would save them.

Saving gathers one tensor at a time to the CPU of rank 0, which holds one copy and no more; the other ranks get an empty
dictionary. Loading reads the whole tensors on every rank and keeps this rank's rows. The number of ranks that saved is
free.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_strategy.engine import FullyShardedEngine
from fsdp_strategy.engine.sharded_tensor import ShardedTensor


def gather_full(engine: FullyShardedEngine, value: ShardedTensor) -> Tensor | None:
    """The whole of a sharded tensor on the CPU of rank 0, None on the other ranks. Collective."""
    piece = value.piece()
    pairs = 2 if piece.is_complex() else 1
    real = torch.view_as_real(piece).reshape(-1) if piece.is_complex() else piece
    pieces = engine.mesh.collectives.collect(real, [numel * pairs for numel in value.piece_numels()])
    if pieces is None:
        return None
    return value.join([torch.view_as_complex(p.view(-1, 2)) if piece.is_complex() else p for p in pieces])


def shard_like(full: Tensor, like: ShardedTensor) -> ShardedTensor:
    """This rank's elements of `full` as a tensor sharded like `like`; the dtype is that of `full`."""
    sharded = like.like(torch.empty_like(like._local_tensor, dtype=full.dtype))
    sharded.keep(full)
    return sharded


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def full_state_dict(engine: FullyShardedEngine, module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with whole CPU tensors on rank 0, empty on the other ranks. Collective."""
    full = {}
    for fqn, value in module.state_dict().items():
        whole = gather_full(engine, value) if isinstance(value, ShardedTensor) else value
        if engine.mesh.shard_rank == 0:
            full[fqn] = whole if isinstance(value, ShardedTensor) else _to_cpu(value)
    return full


def gather_sharded(engine: FullyShardedEngine, value: Any) -> Any:
    """`value` with every sharded tensor in its dictionaries and lists whole on rank 0, None elsewhere. Collective."""
    if isinstance(value, ShardedTensor):
        return gather_full(engine, value)
    if isinstance(value, dict):
        gathered = copy.copy(value)  # of its own type, with its attributes
        gathered.update((key, gather_sharded(engine, item)) for key, item in value.items())
        return gathered
    if type(value) is list:
        return [gather_sharded(engine, item) for item in value]
    return value


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Load whole tensors into the shards. No communication: every rank has the whole `state_dict`.

    Raises:
        RuntimeError: as `load_state_dict` does, naming missing and unexpected keys and shapes that differ.
    """
    current: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    sharded = {}
    for fqn, value in state_dict.items():
        own = current.get(fqn)
        if isinstance(own, ShardedTensor) and isinstance(value, Tensor) and value.shape == own.shape:
            value = shard_like(value, own)
        sharded[fqn] = value
    module.load_state_dict(sharded, strict=strict)


def _params_by_index(optimizer: Optimizer) -> Iterator[tuple[int, Tensor]]:
    """Parameters as `Optimizer.state_dict` numbers them: in order of first appearance in the groups."""
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in seen:
                yield len(seen), param
                seen.add(id(param))


def full_optimizer_state_dict(engine: FullyShardedEngine, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dictionary with whole CPU tensors on rank 0, empty on the other ranks. Collective."""
    state_dict = optimizer.state_dict()
    is_zero = engine.mesh.shard_rank == 0
    full: dict[Any, Any] = {}
    for index, state in state_dict["state"].items():
        full[index] = {
            name: gather_full(engine, value) if isinstance(value, ShardedTensor) else _to_cpu(value)
            for name, value in state.items()
        }
    return {"state": full, "param_groups": state_dict["param_groups"]} if is_zero else {}


def load_full_optimizer_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load whole optimizer state into the shards. No communication.

    Raises:
        ValueError: if the state belongs to other parameters.
    """
    params = dict(_params_by_index(optimizer))
    sharded = {}
    for index, state in state_dict["state"].items():
        param = params.get(index)
        if param is None:
            raise ValueError(
                f"Expected optimizer state for {len(params)} parameters, got some for parameter {index}. The "
                "checkpoint is of another optimizer or model; load only its weights, or configure the same optimizer."
            )
        sharded[index] = {
            name: shard_like(value, param)
            if isinstance(param, ShardedTensor) and isinstance(value, Tensor) and value.shape == param.shape
            else value
            for name, value in state.items()
        }
    optimizer.load_state_dict({"state": sharded, "param_groups": state_dict["param_groups"]})
