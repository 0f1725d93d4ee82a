"""The process groups of the engine: the only place that makes any.

The device mesh has two axes, `(replicate, shard)`; replicate is 1. Gathers and reductions use groups of their own:
gloo has two worker threads per group, and NCCL serialises what shares a communicator. The control group carries the
few bytes on which ranks agree, always between CPUs, so that agreeing never waits for a device.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_strategy.engine.allocator import keep_freed_memory
from fsdp_strategy.engine.collectives import Collectives, GlooCollectives, NativeCollectives
from fsdp_strategy.engine.cut import Cut, FlatCut, RowCut
from fsdp_strategy.engine.flat_tensor import FlatShardedTensor
from fsdp_strategy.engine.sharded_tensor import RowShardedTensor, ShardedTensor

REPLICATE_AXIS, SHARD_AXIS = "replicate", "shard"


class ShardMesh:
    """The `(replicate, shard)` device mesh over all ranks, with the collectives of the shard axis."""

    def __init__(self, device: torch.device, *, native: bool | None = None, timeout: timedelta | None = None) -> None:
        """Make the mesh and its groups. Collective: every rank of the default group must call it.

        Args:
            device: where parameters live; the mesh has its device type.
            native: use the backend's own collectives. Default: for every backend but gloo.
            timeout: of the groups made here; the default group's where None.

        Raises:
            RuntimeError: if `torch.distributed` is not initialised.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "Expected an initialised process group, got none. Call torch.distributed.init_process_group first."
            )
        if device.type == "cpu":
            keep_freed_memory()
        self.device = device
        self.mesh: DeviceMesh = init_device_mesh(
            device.type, (1, dist.get_world_size()), mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS)
        )
        self.shard_axis: DeviceMesh = self.mesh[SHARD_AXIS]
        backend = dist.get_backend(self.shard_axis.get_group())
        control_backend = "fake" if backend == "fake" else "gloo"
        gather_group, reduce_group = self.shard_axis.get_group(), dist.new_group(timeout=timeout)
        control_group = dist.new_group(timeout=timeout, backend=control_backend)
        self.collectives: Collectives
        if backend != "gloo" if native is None else native:
            self.collectives = NativeCollectives(
                device=device, gather_group=gather_group, reduce_group=reduce_group, control_group=control_group
            )
            return
        self.collectives = GlooCollectives(
            device=device, gather_group=gather_group, reduce_group=reduce_group, control_group=control_group,
            downward_groups=(dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)),
        )  # fmt: skip

    def show(self, cut: Cut, local: Tensor) -> ShardedTensor:
        """This rank's shard of a parameter, or of something of its shape, as the tensor that users see."""
        if isinstance(cut, FlatCut):
            return FlatShardedTensor.make(local, cut, self.collectives)
        assert isinstance(cut, RowCut)
        return RowShardedTensor.make(local, cut, self.shard_axis)

    @property
    def is_alive(self) -> bool:
        """Whether the process groups still exist."""
        try:
            return dist.get_rank(self.shard_axis.get_group()) >= 0
        except (RuntimeError, ValueError):
            return False

    @property
    def shard_rank(self) -> int:
        """This rank on the shard axis."""
        return self.collectives.shard_rank

    @property
    def shard_world_size(self) -> int:
        """Ranks on the shard axis."""
        return self.collectives.shard_world_size
