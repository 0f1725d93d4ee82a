"""What races without Lightning: one model, sharded by the engine itself, by torch's FSDP2, by DDP, or not at all.

`ours` is the engine of this package in its default layout, and `ours_flat` and the like in the others. `fully_shard`
shards every block and then the module. `plain` is the unsharded module without communication.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from _models import CPU, Batch, Blocks, Work, loss_of, make_blocks
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_strategy.engine import EngineConfig, FullyShardedEngine, LocalStep, ShardMesh
from fsdp_strategy.engine.engine import LAYOUTS

OURS = {("ours" if layout == LAYOUTS[0] else f"ours_{layout}"): layout for layout in LAYOUTS}  # name: layout
CONFIG_FIELDS = {field.name for field in fields(EngineConfig)}

NUM_WARMUP = 3  # the first step learns the order of collectives, and builds the state of AdamW

PrepareMesh = Callable[[ShardMesh], None]


@dataclass(slots=True, kw_only=True)
class Trainee:
    """A contender that is ready to train."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    engine: FullyShardedEngine | None = None
    autocast: torch.dtype | None = None
    device: torch.device = CPU

    def forward(self, batch: Batch) -> Tensor:
        """The loss, with its graph."""
        context: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            context = torch.autocast(self.device.type, self.autocast)
        with context:
            return loss_of(self.model, batch)

    def step(self, batch: Batch) -> Tensor:
        """One training step; the loss."""
        loss = self.forward(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def warmed_up(self, batch: Batch) -> Callable[[], None]:
        """Forward and backward as a call, which has been made a few times. Gradients are dropped."""

        def forward_backward() -> None:
            self.forward(batch).backward()
            self.optimizer.zero_grad()

        for _ in range(NUM_WARMUP):
            forward_backward()
        return forward_backward


def prepare(
    name: str,
    work: Work,
    *,
    device: torch.device = CPU,
    autocast: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
    prepare_mesh: PrepareMesh | None = None,
    native: bool | None = None,
    **optimizer_options: Any,
) -> Trainee:
    """Build, shard, and give an AdamW. Collective for all but `plain`.

    Args:
        name: one of `OURS`, or "fully_shard", "ddp", "plain".
        work: the model.
        device: where it trains.
        autocast: compute dtype of matrix products; ours and `fully_shard` then gather matrices in it too.
        config: more fields of `EngineConfig`, for ours.
        prepare_mesh: called with the mesh before the engine binds its collectives, for ours.
        native: whether ours uses the backend's own collectives; its default where None.
        **optimizer_options: of AdamW.
    """
    blocks = make_blocks(work, device)
    model: nn.Module = blocks
    engine = None
    if name in OURS:
        mesh = ShardMesh(device, native=native)
        if prepare_mesh is not None:
            prepare_mesh(mesh)
        dtypes = {} if autocast is None else matrix_dtypes(model, autocast)
        engine = FullyShardedEngine(model, mesh, EngineConfig(layout=OURS[name], param_dtypes=dtypes, **(config or {})))
    elif name == "fully_shard":
        model = shard_with_torch(blocks, device, autocast)
    elif name == "ddp":
        model = DistributedDataParallel(model)
    elif name != "plain":
        raise ValueError(f"Expected one of {', '.join([*OURS, 'fully_shard', 'ddp', 'plain'])}, got {name!r}.")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **optimizer_options)
    if engine is not None:
        LocalStep(optimizer, engine.params)
    return Trainee(name=name, model=model, optimizer=optimizer, engine=engine, autocast=autocast, device=device)


def shard_with_torch(model: Blocks, device: torch.device, autocast: torch.dtype | None = None) -> nn.Module:
    """`fully_shard` on every block and then on the module, over all ranks; gradients are reduced in float32."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy() if autocast is None else MixedPrecisionPolicy(autocast, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def matrix_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Matrices are gathered in `dtype`; norms and biases stay as they are, since norm layers reject mixed input."""
    return {fqn: dtype for fqn, param in model.named_parameters() if param.dim() > 1}


def local_of(tensor: Tensor) -> Tensor:
    """The memory of this rank behind a sharded tensor of ours or torch's; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
