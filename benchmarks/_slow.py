"""Collectives that take longer than they do: a network whose every message is late, without any work being done."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fsdp_strategy.engine import ShardMesh

# torch 2.13 renamed both and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Network:
    """Gathers and reductions have a lane each, on which a collective begins when the one before it has ended."""

    def __init__(self) -> None:
        self.start(0.0)

    def start(self, delay_seconds: float) -> None:
        """From now on collectives take so long; nothing has been slept through yet."""
        self._delay_seconds = delay_seconds
        self._free_at = {"gather": 0.0, "reduce": 0.0}
        self.num_collectives = 0
        self.slept_seconds = 0.0

    def begin(self, lane: str) -> "LateWork":
        """A collective begins."""
        self.num_collectives += 1
        self._free_at[lane] = max(time.perf_counter(), self._free_at[lane]) + self._delay_seconds
        return LateWork(self, self._free_at[lane])

    def sleep_until(self, end: float) -> None:
        """Return no earlier than `end`, and count what was slept."""
        start = time.perf_counter()
        if self._delay_seconds and end > start:
            time.sleep(end - start)
            self.slept_seconds += time.perf_counter() - start


class LateWork:
    """A collective whose end is not seen before its time."""

    def __init__(self, network: Network, end: float) -> None:
        self._network, self._end = network, end

    def wait(self) -> bool:
        """Sleep until it may be seen."""
        self._network.sleep_until(self._end)
        return True


class DeviceNetwork:
    """The same on a CUDA device: each lane is a stream, on which a collective is a kernel that only takes time."""

    def __init__(self) -> None:
        self._cycles_per_second = _cycles_per_second()
        self._lanes = {"gather": torch.cuda.Stream(), "reduce": torch.cuda.Stream()}
        self.start(0.0)

    def start(self, delay_seconds: float) -> None:
        """From now on collectives take so long."""
        self._num_cycles = int(delay_seconds * self._cycles_per_second)
        self.num_collectives = 0

    def begin(self, lane: str) -> "DeviceWork":
        """A collective begins when what is queued on the current stream is done."""
        self.num_collectives += 1
        stream, end = self._lanes[lane], torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if self._num_cycles:
                torch.cuda._sleep(self._num_cycles)
            end.record()
        return DeviceWork(end)


class DeviceWork:
    """A collective on its stream."""

    def __init__(self, end: torch.cuda.Event) -> None:
        self._end = end

    def wait(self) -> bool:
        """Make the current stream wait, not the host."""
        torch.cuda.current_stream().wait_event(self._end)
        return True


def _cycles_per_second() -> float:
    """Of the kernel that only takes time."""
    num_cycles = 20_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(num_cycles)
    start.record()
    torch.cuda._sleep(num_cycles)
    end.record()
    torch.cuda.synchronize()
    return 1e3 * num_cycles / start.elapsed_time(end)


def slow_down(mesh: ShardMesh, network: Network | DeviceNetwork) -> None:
    """Delay every gather and reduction that is bound on the mesh from now on."""
    collectives = mesh.collectives
    for bind_name, lane in (("bind_gather", "gather"), ("bind_reduce", "reduce")):
        setattr(collectives, bind_name, _bind_late(getattr(collectives, bind_name), network, lane))


def _bind_late(bind: Any, network: Network | DeviceNetwork, lane: str) -> Any:
    def bind_late(*args: Any, **kwargs: Any) -> Any:
        operation = bind(*args, **kwargs)
        start = operation.start

        def start_late(*tensors: Any, **options: Any) -> Any:
            pending = start(*tensors, **options)
            pending.works.append(network.begin(lane))
            return pending

        operation.start = start_late
        return operation

    return bind_late


def slow_down_torch(model: nn.Module, network: Network | DeviceNetwork) -> None:
    """Delay every gather and reduction of `fully_shard`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_LateAllGather(network))
            module.set_custom_reduce_scatter(_LateReduceScatter(network))


class _Allocates:
    def __init__(self, network: Network | DeviceNetwork) -> None:
        self._network = network

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As torch's own collectives do."""
        return torch.empty(*size, dtype=dtype, device=device)


class _LateAllGather(_Allocates, AllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        _all_gather(output_tensor, input_tensor, group=group)
        return _finish(self._network.begin("gather"), async_op)


class _LateReduceScatter(_Allocates, ReduceScatter):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        _reduce_scatter(output_tensor, input_tensor, op, group=group)
        return _finish(self._network.begin("reduce"), async_op)


def _finish(work: LateWork | DeviceWork, async_op: bool) -> LateWork | DeviceWork | None:
    """As torch does: a collective that is not asked to be asynchronous is over, on the current stream, on return."""
    if async_op:
        return work
    work.wait()
    return None
