"""Full checkpoints: plain tensors under the names of the unsharded model, as a single device would save them.

Saving gathers one tensor at a time to the CPU of rank 0, which holds one copy and no more; the other ranks get an empty
dictionary. Loading reads the whole tensors on every rank and keeps this rank's rows. The number of ranks that saved is
free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_strategy.engine import FullyShardedEngine
from fsdp_strategy.engine.layout import shard_bounds
from fsdp_strategy.engine.sharded_tensor import write_rows


def gather_full(engine: FullyShardedEngine, value: DTensor) -> Tensor | None:
    """The whole of a sharded tensor on the CPU of rank 0, None on the other ranks. Collective."""
    num_ranks = engine.shard_world_size
    shape, local = value.shape, value._local_tensor.detach()
    if value.placements[0].is_replicate():
        return local.cpu().clone() if engine.mesh.shard_rank == 0 else None
    row_numel = shape[1:].numel()
    bounds = [shard_bounds(shape[0], num_ranks, rank) for rank in range(num_ranks)]
    flat = local.contiguous().reshape(-1)
    pairs = 2 if flat.is_complex() else 1
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    pieces = engine.mesh.collectives.collect(flat, [(last - first) * row_numel * pairs for first, last in bounds])
    if pieces is None:
        return None
    full = torch.cat(pieces)
    return (torch.view_as_complex(full.reshape(-1, 2)) if local.is_complex() else full).reshape(shape)


def shard_like(full: Tensor, like: DTensor) -> DTensor:
    """This rank's rows of `full` as a tensor sharded like `like`; the dtype is that of `full`."""
    local = torch.empty_like(like._local_tensor, dtype=full.dtype)
    sharded = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    write_rows(sharded, full)
    return sharded


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def full_state_dict(engine: FullyShardedEngine, module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with whole CPU tensors on rank 0, empty on the other ranks. Collective."""
    full = {}
    for fqn, value in module.state_dict().items():
        whole = gather_full(engine, value) if isinstance(value, DTensor) else value
        if engine.mesh.shard_rank == 0:
            full[fqn] = whole if isinstance(value, DTensor) else _to_cpu(value)
    return full


def load_full_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Load whole tensors into the shards. No communication: every rank has the whole `state_dict`.

    Raises:
        RuntimeError: as `load_state_dict` does, naming missing and unexpected keys and shapes that differ.
    """
    current: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    sharded = {}
    for fqn, value in state_dict.items():
        own = current.get(fqn)
        if isinstance(own, DTensor) and isinstance(value, Tensor) and value.shape == own.shape:
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
            name: gather_full(engine, value) if isinstance(value, DTensor) else _to_cpu(value)
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
            if isinstance(param, DTensor) and isinstance(value, Tensor) and value.shape == param.shape
            else value
            for name, value in state.items()
        }
    optimizer.load_state_dict({"state": sharded, "param_groups": state_dict["param_groups"]})
