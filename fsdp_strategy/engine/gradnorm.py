"""Norms and clipping of sharded gradients: local arithmetic and one scalar all-reduce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fsdp_strategy.engine.collectives import Collectives
from fsdp_strategy.engine.sharded_tensor import GRAD, RowShardedTensor, local_of


def local_grads(params: Iterable[Tensor], *, own_only: bool = False) -> list[Tensor]:
    """This rank's shards of the gradients that are there.

    `own_only` leaves replicated gradients (of 0-d parameters) to rank 0, so that all ranks together have each once.
    """
    get = GRAD.__get__
    with torch._C.DisableTorchFunctionSubclass():
        grads = [grad for param in params if (grad := get(param)) is not None]
        if own_only:
            grads = [grad for grad in grads if grad.dim() or not _is_another_ranks(grad)]
        return [local_of(grad) for grad in grads]


def _is_another_ranks(grad: Tensor) -> bool:
    if not isinstance(grad, RowShardedTensor) or not grad.is_replicated:
        return False
    return grad.device_mesh.get_local_rank() != 0


@torch.no_grad()
def global_norm(grads: Sequence[Tensor], collectives: Collectives, norm_type: float = 2.0) -> Tensor:
    """The norm of all ranks' shards together, as one vector; 0-d, float32 or the widest gradient dtype. Collective.

    Args:
        grads: this rank's shards; those of all ranks together are the whole gradients.
        collectives: of the shard axis.
        norm_type: p > 0, or infinity.
    """
    dtype = torch.float32
    for own in {grad.dtype for grad in grads}:
        dtype = torch.promote_types(dtype, own.to_real() if own.is_complex else own)
    present = [grad for grad in grads if grad.numel()]
    norms = list(torch._foreach_norm(present, norm_type, dtype=dtype)) if present else []
    stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype, device=collectives.device)
    if math.isinf(norm_type):
        return collectives.all_reduce(stacked.max(), "max")
    return collectives.all_reduce(stacked.pow(norm_type).sum(), "sum").pow(1.0 / norm_type)


@torch.no_grad()
def clip_grad_norm(
    params: Iterable[Tensor], max_norm: float, collectives: Collectives, norm_type: float = 2.0
) -> Tensor:
    """Scale the sharded gradients in place so that their global norm is at most `max_norm`; return the norm before.

    The factor is `max_norm / (norm + 1e-6)`, at most 1, as in `torch.nn.utils.clip_grad_norm_`. Collective.
    """
    params = list(params)
    norm = global_norm(local_grads(params, own_only=True), collectives, norm_type)
    grads = local_grads(params)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].device))
    return norm


@torch.no_grad()
def clip_grad_value(params: Iterable[Tensor], clip_value: float) -> None:
    """Clamp every element of the sharded gradients to `[-clip_value, clip_value]`. No communication."""
    for grad in local_grads(params):
        grad.clamp_(-clip_value, clip_value)
