"""A transformer block of width 512 on four ranks: shard shapes, sizes, and what the choice of units costs.

The numbers are those of a worked example: 8 heads, a hidden layer of 2048, 12 blocks, rows cut into four.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_strategy.engine import find_units
from fsdp_strategy.engine.cut import ParamSpec
from fsdp_strategy.engine.layout import MessagePolicy, plan_span
from fsdp_strategy.engine.units import UnitPolicy
from tests.engine_cases import seeded, shard
from tests.rank_pool import RankPool

WORLD_SIZE, WIDTH, NUM_HEADS, HIDDEN, NUM_BLOCKS = 4, 512, 8, 2048, 12
NUM_RUN = 3  # blocks where they are run; the arithmetic is for all 12
MATRICES = {"W_Q": (512, 512), "W_K": (512, 512), "W_V": (512, 512), "W_O": (512, 512)}
SHARD_SHAPES = {
    **dict.fromkeys(MATRICES, (128, 512)),
    "W_up": (128, 2048),
    "W_down": (512, 512),
    "norm1": (128,),
    "norm2": (128,),
}
BLOCK_NUMEL = 3_152_384
NORM_EPS = 1e-5


class ListedBlock(nn.Module):
    """Six matrices and two norm scales, as the example lists them."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {**MATRICES, "W_up": (WIDTH, HIDDEN), "W_down": (HIDDEN, WIDTH)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * shape[0] ** -0.5))
        self.norm1, self.norm2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # (rows, tokens, width)
        h = nn.functional.rms_norm(x, (WIDTH,), self.norm1, NORM_EPS)
        q, k, v = ((h @ W).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for W in (self.W_Q, self.W_K, self.W_V))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + mixed.transpose(1, 2).flatten(2) @ self.W_O
        h = nn.functional.rms_norm(x, (WIDTH,), self.norm2, NORM_EPS)
        return x + nn.functional.gelu(h @ self.W_up) @ self.W_down


class TransformerBlock(nn.Module):
    """As the example codes it."""

    def __init__(self, hidden_dim: int = WIDTH, num_heads: int = NUM_HEADS, ffn_dim: int = HIDDEN) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_dim)
        self.self_attn = nn.MultiheadAttention(hidden_dim, num_heads, batch_first=True)
        self.norm2 = nn.LayerNorm(hidden_dim)
        self.ffn = nn.Sequential(nn.Linear(hidden_dim, ffn_dim), nn.GELU(), nn.Linear(ffn_dim, hidden_dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x), self.norm1(x), self.norm1(x))[0]
        return x + self.ffn(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, num_layers: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Whole(nn.Module):
    """Around the transformer, so that all of it can be one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(NUM_RUN)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _blank(build: Callable[[], nn.Module]) -> Any:
    """A model of zeros: quick to make, where values do not matter."""
    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.zeros_(param)
    return model


def _listed_shapes() -> tuple[dict[str, tuple[int, ...]], bool]:
    """Shard shapes of a listed block, and whether a training step leaves gradients of those shapes."""
    block = _blank(ListedBlock)
    shard(nn.Sequential(block), units="ListedBlock")
    block(torch.ones(1, 2, WIDTH)).mean().backward()
    shapes = {fqn: tuple(param.to_local().shape) for fqn, param in block.named_parameters()}
    grads = {fqn: tuple(param.grad.to_local().shape) for fqn, param in block.named_parameters()}
    return shapes, shapes == grads


def test_four_ranks_each_hold_a_quarter_of_the_rows_of_every_matrix(ranks: RankPool) -> None:
    for shapes, grads_agree in ranks.run(_listed_shapes, WORLD_SIZE):
        assert shapes == SHARD_SHAPES
        assert grads_agree
        matrices = [shape for shape in shapes.values() if len(shape) == 2]
        assert len(matrices) == 6
        assert sum(rows * columns for rows, columns in matrices) == 786_432


class SixMatrices(nn.Module):
    """The matrices of the listed block and nothing else, numbered through, so that an element tells where it lies."""

    def __init__(self) -> None:
        super().__init__()
        first = 0
        for name, param in ListedBlock().named_parameters():
            if param.dim() == 2:
                numbers = torch.arange(first, first + param.numel(), dtype=torch.float32)
                setattr(self, name, nn.Parameter(numbers.view_as(param)))
                first += param.numel()

    def forward(self, x: Tensor) -> Tensor:
        for param in self.parameters():
            x = x + param.sum() * 1e-9
        return x


def _flat_elements() -> tuple[Tensor, Tensor]:
    """All that this rank holds of the six matrices in the flat layout, and of their gradients."""
    block = SixMatrices()
    shard(nn.Sequential(block), units="SixMatrices", layout="flat")
    block(torch.ones(1)).sum().backward()
    held = torch.cat([param.to_local() for param in block.parameters()])
    return held.clone(), torch.cat([param.grad.to_local() for param in block.parameters()])


def test_in_the_flat_layout_rank_r_holds_one_run_of_786_432_elements(ranks: RankPool) -> None:
    results = ranks.run(_flat_elements, WORLD_SIZE)
    assert sum(held.numel() for held, _ in results) == 3_145_728
    for rank, (held, grads) in enumerate(results):
        assert torch.equal(held, torch.arange(786_432 * rank, 786_432 * (rank + 1), dtype=torch.float32))
        assert torch.equal(grads, torch.full_like(held, 1e-9))


def _rows_of_w_q() -> Tensor:
    block = seeded(ListedBlock)
    shard(nn.Sequential(block), units="ListedBlock")
    return block.W_Q.to_local().clone()


def test_rank_r_holds_rows_r_times_128_and_the_next_127(ranks: RankPool) -> None:
    whole = seeded(ListedBlock).W_Q.detach()
    for rank, rows in enumerate(ranks.run(_rows_of_w_q, WORLD_SIZE)):
        assert torch.equal(rows, whole[128 * rank : 128 * (rank + 1)])


def test_the_coded_block_has_3_152_384_parameters_and_a_rank_holds_a_quarter(ranks: RankPool) -> None:
    assert _numel(TransformerBlock()) == BLOCK_NUMEL
    assert BLOCK_NUMEL // WORLD_SIZE == 788_096
    for held, _, _ in ranks.run(_visible, WORLD_SIZE):
        assert held == [788_096] * NUM_RUN


def _visible() -> tuple[list[int], bool, list[tuple[str, bool, bool]]]:
    """Elements that this rank holds of every block, whether the class stayed, and names and kinds of parameters."""
    model = _blank(lambda: Transformer(NUM_RUN))
    shard(model)
    seen = [(fqn, isinstance(p, DTensor), p.requires_grad) for fqn, p in model.named_parameters()]
    held = [sum(param.to_local().numel() for param in layer.parameters()) for layer in model.layers]
    return held, type(model) is Transformer and type(model.layers[0]) is TransformerBlock, seen


def test_the_model_keeps_its_class_and_its_names_and_shows_dtensors(ranks: RankPool) -> None:
    names = [fqn for fqn, _ in Transformer(NUM_RUN).named_parameters()]
    assert "layers.0.self_attn.in_proj_weight" in names
    for _, is_same_class, seen in ranks.run(_visible, WORLD_SIZE):
        assert is_same_class
        assert [fqn for fqn, _, _ in seen] == names
        assert all(is_dtensor and requires_grad for _, is_dtensor, requires_grad in seen)


def _granularity(units: UnitPolicy, prefetch_limit: int) -> tuple[int, int, int, dict[str, int]]:
    """Peak unsharded bytes, gathers and elements sent in the forward, and elements per unit."""
    model = _blank(Whole)
    engine = shard(model, units=units, prefetch_limit=prefetch_limit)
    x = torch.ones(1, 2, WIDTH)
    with torch.no_grad():
        model(x)  # the second forward follows a schedule, and prefetches
        with engine.record() as recorder:
            model(x)
    sent = recorder.sent_numel("all_gather")
    return (
        recorder.peak_nbytes["unsharded_param"], recorder.count("all_gather"), sent,
        {unit.fqn: unit.numel for unit in engine.units},
    )  # fmt: skip


LARGEST_LINEAR = WIDTH * HIDDEN + HIDDEN  # the first of the hidden layer, with its bias
ALL_LINEARS = NUM_RUN * (2 * WIDTH * HIDDEN + HIDDEN + WIDTH)
# Attention reads its weights without calling the module that holds them, so that they stay with the root unit.
REST = NUM_RUN * BLOCK_NUMEL - ALL_LINEARS

GRANULARITIES = [
    ("Transformer", 0, NUM_RUN * BLOCK_NUMEL, 1),
    ("TransformerBlock", 0, BLOCK_NUMEL, NUM_RUN),
    ("TransformerBlock", 1, 2 * BLOCK_NUMEL, NUM_RUN),
    ("Linear", 0, REST + LARGEST_LINEAR, 2 * NUM_RUN + 1),
    ("Linear", 1, REST + ALL_LINEARS // NUM_RUN, 2 * NUM_RUN + 1),
]


@pytest.mark.parametrize(("units", "prefetch_limit", "peak_numel", "num_gathers"), GRANULARITIES)
def test_units_decide_how_much_is_unsharded_at_once_and_in_how_many_gathers_but_not_what_is_sent(
    ranks: RankPool, units: str, prefetch_limit: int, peak_numel: int, num_gathers: int
) -> None:
    for peak_nbytes, gathers, sent, numel_of_unit in ranks.run(_granularity, WORLD_SIZE, units, prefetch_limit):
        assert peak_nbytes == 4 * peak_numel
        assert gathers == num_gathers == len(numel_of_unit)
        assert sum(numel_of_unit.values()) == NUM_RUN * BLOCK_NUMEL
        # (N - 1) / N of the model's elements from every rank, times N receivers' worth of shards.
        assert sent == (WORLD_SIZE - 1) * NUM_RUN * BLOCK_NUMEL // WORLD_SIZE


def _plan_numels(policy: UnitPolicy, rank: int) -> dict[str, tuple[int, int, int]]:
    """Per unit of the 12 blocks: elements unsharded, held by the rank, and sent by it in one gather; nothing is run."""
    with torch.device("meta"):
        model = Transformer()
    planned = {}
    for plan in find_units(model, policy):
        specs = tuple(ParamSpec(s.fqn, tuple(s.param.shape), s.param.stride()) for s in plan.params)
        layout = plan_span(
            specs, 4, shard_world_size=WORLD_SIZE, shard_rank=rank, policy=MessagePolicy(equal_pieces=False)
        )
        held = sum(layout.shard_param_numel(index) for index in range(len(specs)))
        planned[plan.fqn] = (layout.unsharded_numel, held, layout.sent_numel())
    return planned


@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_twelve_blocks_have_37_8_million_parameters_in_twelve_equal_units(rank: int) -> None:
    planned = _plan_numels("auto", rank)
    assert list(planned) == [f"layers.{index}" for index in range(NUM_BLOCKS)]
    assert set(planned.values()) == {(BLOCK_NUMEL, 788_096, 3 * 788_096)}
    assert round(NUM_BLOCKS * BLOCK_NUMEL / 1e6, 1) == 37.8


def test_units_of_single_layers_of_twelve_blocks_are_many_and_small() -> None:
    planned = _plan_numels("Linear", 0)
    root = planned.pop("")
    assert len(planned) == 2 * NUM_BLOCKS
    assert max(unsharded for unsharded, _, _ in planned.values()) == LARGEST_LINEAR
    assert root[0] + sum(unsharded for unsharded, _, _ in planned.values()) == NUM_BLOCKS * BLOCK_NUMEL


def _mixed_frozen() -> tuple[list[str], list[str], int]:
    """Which parameters have gradients when a block mixes frozen and trainable ones, and elements reduced."""
    model = _blank(lambda: Transformer(2))
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name or "in_proj" in name)
    engine = shard(model)
    with engine.record() as recorder:
        model(torch.ones(1, 2, WIDTH)).mean().backward()
    named = list(model.named_parameters())
    with_grad = [fqn for fqn, param in named if param.grad is not None]
    trainable = [fqn for fqn, param in named if param.requires_grad]
    return with_grad, trainable, recorder.sent_numel("reduce_scatter")


def test_a_unit_may_mix_frozen_and_trainable_parameters(ranks: RankPool) -> None:
    model = Transformer(2)
    numel = sum(p.numel() for name, p in model.named_parameters() if "norm" in name or "in_proj" in name)
    for with_grad, trainable, sent in ranks.run(_mixed_frozen, WORLD_SIZE):
        assert with_grad == trainable
        assert 0 < len(trainable) < len(list(model.parameters()))
        assert sent == (WORLD_SIZE - 1) * numel // WORLD_SIZE
