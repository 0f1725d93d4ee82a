"""The model that all benchmarks train, and its batches. Needs torch only."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CPU = torch.device("cpu")
SIZES = {"small": (1, 32), "medium": (2, 64), "large": (8, 128)}  # sequences in a batch of one rank, tokens in each

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The model and its batches. The defaults are a 12-block transformer of 37.8 million parameters.

    `has_norm` puts a norm behind the blocks: two more parameters, which form the root unit.
    """

    batch_size: int
    num_tokens: int
    num_blocks: int = 12
    dim: int = 512
    num_heads: int = 8
    ffn_dim: int = 2048
    has_norm: bool = False

    @property
    def block_numel(self) -> int:
        """Elements of one block's parameters."""
        attention = 4 * self.dim * self.dim + 4 * self.dim
        ffn = 2 * self.dim * self.ffn_dim + self.ffn_dim + self.dim
        return attention + ffn + 4 * self.dim

    @property
    def num_params(self) -> int:
        """Elements of all parameters."""
        return self.num_blocks * self.block_numel + 2 * self.dim * self.has_norm

    def batches(self, num_batches: int, *, rank: int, device: torch.device = CPU) -> list[Batch]:
        """Random inputs, different on every rank; the target is the input of the token before."""
        generator = torch.Generator().manual_seed(1000 + rank)
        shape = (self.batch_size, self.num_tokens, self.dim)
        inputs = [torch.randn(shape, generator=generator).to(device) for _ in range(num_batches)]
        return [(x, x.roll(1, dims=1)) for x in inputs]


# 12 parameters a unit, which need no time to compute or to send: what is left is the host's.
TINY = Work(batch_size=1, num_tokens=2, dim=16, num_heads=2, ffn_dim=64, has_norm=True)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(work.dim)
        self.self_attn = nn.MultiheadAttention(work.dim, work.num_heads, batch_first=True)
        self.norm2 = nn.LayerNorm(work.dim)
        self.ffn = nn.Sequential(nn.Linear(work.dim, work.ffn_dim), nn.GELU(), nn.Linear(work.ffn_dim, work.dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.self_attn(normed, normed, normed, need_weights=False)[0]
        return x + self.ffn(self.norm2(x))


class Blocks(nn.Module):
    """Blocks, and nothing else unless the work asks for a norm."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerBlock(work) for _ in range(work.num_blocks))
        self.norm = nn.LayerNorm(work.dim) if work.has_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def make_blocks(work: Work, device: torch.device = CPU) -> Blocks:
    """Equal initial weights on all ranks and for all contenders."""
    with torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(0)
        return Blocks(work)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean square error of one batch."""
    x, y = batch
    return F.mse_loss(model(x), y)
