"""A byte-level GPT as an ordinary LightningModule. Nothing here knows of sharding."""

import math
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from stdlib_text import NUM_BYTE_VALUES
from torch import Tensor, nn
from torchmetrics.text import Perplexity


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of the model, and the peak learning rate that suits it."""

    num_blocks: int
    width: int
    num_heads: int
    context: int = 128
    lr: float = 1e-3


SIZES = {
    "tiny": GPTConfig(num_blocks=2, width=64, num_heads=2, context=64, lr=4e-3),
    "small": GPTConfig(num_blocks=4, width=128, num_heads=4, context=64, lr=4e-3),
    "medium": GPTConfig(num_blocks=8, width=512, num_heads=8, context=256, lr=6e-4),
    "large": GPTConfig(num_blocks=12, width=768, num_heads=12, context=512, lr=6e-4),
}


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, head width)
        return self.out(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each behind its own LayerNorm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(config.width), Attention(config)
        self.norm_2, self.mlp = nn.LayerNorm(config.width), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """From bytes (batch, time) to the logits of each next byte (batch, time, 256)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_BYTE_VALUES, config.width)
        self.position = nn.Embedding(config.context, config.width)
        blocks = [Block(config) for _ in range(config.num_blocks)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTE_VALUES)
        self.apply(_init_weights)
        for block in blocks:  # each adds twice to the stream, whose variance shall not grow with depth
            for layer in (block.attention.out, block.mlp.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.num_blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class LitGPT(L.LightningModule):
    """Training, validation and sampling of a `GPT`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.gpt = GPT(config)
        self.perplexity = Perplexity()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, targets = batch
        logits = self(tokens)
        self.perplexity(logits, targets)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_perplexity", self.perplexity)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW; the learning rate rises for a twentieth of the steps and then follows a cosine down to a twentieth."""
        num_steps = self.trainer.max_steps
        num_warmup = max(1, num_steps // 20)

        def factor(step: int) -> float:
            if step < num_warmup:
                return (step + 1) / num_warmup
            progress = (step - num_warmup) / max(1, num_steps - num_warmup)
            return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))

        optimizer = torch.optim.AdamW(self.parameters(), lr=self.config.lr, betas=(0.9, 0.95), weight_decay=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, *, temperature: float, seed: int) -> bytes:
        """The prompt and a sampled continuation.

        With sharded weights a forward needs all ranks, so all call this alike: the same prompt, length and seed.
        """
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)])  # (1, time) int64, on the CPU
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.config.context :].to(self.device))[0, -1]
            probabilities = (logits.float().cpu() / temperature).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)[None]], dim=1)
        return bytes(tokens[0].tolist())
