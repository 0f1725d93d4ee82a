"""Lightning precision plugins for sharded training.

`Trainer(precision=...)` gives the strategy one of Lightning's plugins; `shard_precision` answers with ours of the same
precision. They differ where ranks must act together: the norm for clipping, and the loss scaler.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.plugins import precision as lightning_precision
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from fsdp_strategy.engine import FullyShardedEngine
from fsdp_strategy.engine.gradnorm import clip_grad_norm, clip_grad_value, local_grads

SUPPORTED = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")


class ShardedGradScaler(torch.amp.GradScaler):
    """A loss scaler on whose overflows all ranks agree: one rank's infinity makes every rank skip the step."""

    engine: FullyShardedEngine | None = None

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        assert self.engine is not None
        grads = local_grads(param for group in optimizer.param_groups for param in group["params"])
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            if grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError("Expected fp32 gradients, got fp16 ones. Keep parameters in fp32 with '16-mixed'.")
            if grad.numel():
                by_dtype.setdefault(grad.dtype, []).append(grad)
        for same in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(same, found_inf, inv_scale)
        found_inf.copy_(self.engine.mesh.collectives.all_reduce(found_inf, "max"))
        return {found_inf.device: found_inf}


class ShardedPrecision(Precision):
    """`32-true`: parameters as they are, clipping over all ranks' shards. The base of the others."""

    engine: FullyShardedEngine | None = None

    def attach(self, engine: FullyShardedEngine) -> None:
        """Called by the strategy when the module is sharded."""
        self.engine = engine

    def param_dtypes(self, module: nn.Module) -> dict[str, torch.dtype]:
        """By fqn, the dtype to gather and compute in, where it is not the parameter's own."""
        return {}

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self.engine is not None
        clip_grad_norm(self.main_params(optimizer), clip_val, self.engine.mesh.collectives)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value(self.main_params(optimizer), clip_val)


class ShardedHalfPrecision(ShardedPrecision, HalfPrecision):
    """`bf16-true`: parameters and optimizer state in bf16, gradients summed over ranks in fp32."""


class ShardedDoublePrecision(ShardedPrecision, DoublePrecision):
    """`64-true`: everything in fp64, also the sum over ranks."""


class MixedPrecision(ShardedPrecision, lightning_precision.MixedPrecision):
    """`bf16-mixed` and `16-mixed`: fp32 shards; matrices are gathered in the low precision and autocast stays on.

    Parameters of two and more dimensions (matrices, convolution kernels, embeddings) are gathered in the low precision:
    autocast would cast them anyway, and would keep its copies alive until backward. Norm and bias parameters are
    gathered in fp32, which norm layers need for fp32 inputs. Embeddings return fp32, as they do under autocast.

    The class bears the name under which Lightning saves the scaler's state, so that checkpoints are interchangeable.
    """

    def __init__(
        self, precision: Literal["16-mixed", "bf16-mixed"], device: str, scaler: ShardedGradScaler | None = None
    ) -> None:
        """Make the plugin.

        Args:
            precision: "bf16-mixed", or "16-mixed" with a loss scaler.
            device: device type for autocast, "cpu" or "cuda".
            scaler: of "16-mixed"; one with default settings if None.
        """
        if scaler is None and precision == "16-mixed":
            scaler = ShardedGradScaler(device)
        super().__init__(precision, device, scaler)
        self.dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16

    @override
    def attach(self, engine: FullyShardedEngine) -> None:
        super().attach(engine)
        if isinstance(self.scaler, ShardedGradScaler):
            self.scaler.engine = engine

    @override
    def param_dtypes(self, module: nn.Module) -> dict[str, torch.dtype]:
        return {
            fqn: self.dtype
            for fqn, param in module.named_parameters()
            if param.dim() >= 2 and param.dtype == torch.float32
        }

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        for child in module.modules():
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
                child.register_forward_hook(_to_float32)
        return module


def _to_float32(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output


def shard_precision(plugin: Precision) -> ShardedPrecision:
    """Our plugin of the same precision as one of Lightning's.

    Raises:
        ValueError: for a precision that sharded training does not support.
        TypeError: for a plugin class that is neither Lightning's nor ours.
    """
    if isinstance(plugin, ShardedPrecision):
        return plugin
    if plugin.precision not in SUPPORTED:
        raise ValueError(
            f"Expected a precision among {', '.join(map(repr, SUPPORTED))}, got {plugin.precision!r}. Set "
            "Trainer(precision=...) to one of them."
        )
    if type(plugin) is Precision:
        return ShardedPrecision()
    if type(plugin) is HalfPrecision:
        return ShardedHalfPrecision("bf16-true")
    if type(plugin) is DoublePrecision:
        return ShardedDoublePrecision()
    if type(plugin) is lightning_precision.MixedPrecision:
        if plugin.scaler is None or plugin.scaler.state_dict() == type(plugin.scaler)(plugin.device).state_dict():
            return MixedPrecision("bf16-mixed" if plugin.precision == "bf16-mixed" else "16-mixed", plugin.device)
        raise TypeError(
            "Expected a scaler on which all ranks agree, got a GradScaler with settings of its own. Pass "
            "MixedPrecision('16-mixed', device, ShardedGradScaler(device, ...)) from fsdp_strategy.precision."
        )
    raise TypeError(
        f"Expected a precision plugin of Lightning or fsdp_strategy.precision, got {type(plugin).__name__}. Derive it "
        "from ShardedPrecision, so that clipping sees the shards of all ranks."
    )
