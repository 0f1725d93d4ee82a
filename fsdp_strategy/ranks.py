"""The ranks of a strategy: how they are launched, numbered, and speak to each other. Nothing here is about sharding."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from fsdp_strategy import _compat
from fsdp_strategy.launcher import ShardedMultiProcessingLauncher

StartMethod = Literal["popen", "spawn", "fork"]


class JoinedRanks(ClusterEnvironment):
    """Tells a Trainer about ranks that are in a process group already: nothing is started, and nobody meets again."""

    @property
    def creates_processes_externally(self) -> bool:
        """They are there."""
        return True

    @property
    def main_address(self) -> str:
        """Nobody may ask."""
        raise AssertionError("The ranks have met already.")

    @property
    def main_port(self) -> int:
        """Nobody may ask."""
        raise AssertionError("The ranks have met already.")

    @staticmethod
    def detect() -> bool:
        """Only where it is asked for."""
        return False

    def world_size(self) -> int:
        """Of the default process group."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """The process group knows it."""

    def global_rank(self) -> int:
        """In the default process group."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """The process group knows it."""

    def local_rank(self) -> int:
        """All ranks are on one machine."""
        return dist.get_rank()

    def node_rank(self) -> int:
        """All ranks are on one machine."""
        return 0


class RankedStrategy(ParallelStrategy):
    """A strategy with one process per device."""

    def __init__(
        self,
        *,
        start_method: StartMethod,
        process_group_backend: str | None,
        timeout: timedelta | None,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        """See `FullyShardedStrategy`."""
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._num_nodes = 1
        self._start_method = start_method
        self._process_group_backend = process_group_backend
        self._timeout = timeout

    @property
    def is_distributed(self) -> bool:
        """Asks the Trainer for distributed samplers and synchronised metrics."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Machines, set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """As given, or as chosen for the device once the process group is there."""
        return self._process_group_backend

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            # Also where another launcher has started the ranks: it validates their number then.
            self._launcher = _compat._SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = ShardedMultiProcessingLauncher(self, start_method=self._start_method)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero utilities which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _compat.set_rank_zero(self.global_rank)

    def _check_num_ranks(self) -> None:
        expected, got = self.num_nodes * self.num_processes, self.world_size
        if expected != got:
            raise ValueError(
                f"[rank {self.global_rank}] Expected {expected} ranks from Trainer(num_nodes={self.num_nodes}, "
                f"devices={self.num_processes}), got {got} launched ones. Set devices and num_nodes to what "
                "was launched."
            )

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        self._check_num_ranks()
        super().setup_environment()
        _compat.reset_seed()
        if self._process_group_backend is None:
            self._process_group_backend = _compat._get_default_process_group_backend_for_device(self.root_device)
        assert self.cluster_environment is not None
        device_id = None if self.root_device.type == "cpu" else self.root_device
        _compat._init_dist_connection(
            self.cluster_environment, self._process_group_backend, timeout=self._timeout, device_id=device_id
        )

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not _compat._distributed_is_initialized():
            return
        is_nccl = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[self.root_device.index] if is_nccl else None)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not _compat._distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        if isinstance(tensor, Tensor):
            return _compat._sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor
