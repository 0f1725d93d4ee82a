"""A model built on the meta device: the same weights as one built in the ordinary way, never whole on any rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_strategy.engine import engine as engine_module
from tests.engine_cases import CPU, WIDTH, Net, SmallBlock, join_params, seeded, shard, snapshot
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts


class Attending(nn.Module):
    """A parent that initialises what its child holds, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x)[0]
        return self.norm(x.mT).mT


class Tied(nn.Module):
    """Embedding and head share a weight of five rows, over two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList([SmallBlock(), SmallBlock()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OwnReset(nn.Module):
    """Parameters of its own, and a method that gives them their values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3, WIDTH))
        self.register_buffer("steps", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        self.steps.copy_(torch.arange(4.0))


class OfOwnReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OwnReset(), OwnReset()])


class Transformer(nn.Module):
    """A module without parameters of its own that initialises all of its children's, which are units by then."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(WIDTH, 2, 1, 1, dim_feedforward=16, batch_first=True)


BUILDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention, batch norm": (lambda: nn.Sequential(Attending(), Attending()), "auto"),
    "own reset": (OfOwnReset, "auto"),
    "a parent's reset over units": (Transformer, "Linear"),
}


def _from_meta(name: str) -> tuple[Any, dict[str, Tensor], bool]:
    """Shards and buffers of a model built on meta, and whether tied weights still are one."""
    build, units = (Tied, "auto") if name == "tied" else BUILDS[name]
    with torch.device("meta"):
        model = build()
    num_params = len(list(model.parameters()))
    torch.manual_seed(0)
    shard(model, units=units)
    buffers = {fqn: buffer.clone() for fqn, buffer in model.named_buffers()}
    return snapshot(model), buffers, num_params == len(list(model.parameters()))


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_and_buffers_are_those_of_an_ordinary_construction(ranks: RankPool, name: str, world_size: int) -> None:
    model = seeded(BUILDS[name][0])
    reference = snapshot(model)
    answers = ranks.run(_from_meta, world_size, name)
    joined = join_params([shards for shards, _, _ in answers], reference)
    for fqn, value in reference.params.items():
        assert torch.equal(joined[fqn], value), fqn
    for _, buffers, are_ties_kept in answers:
        assert are_ties_kept
        assert buffers.keys() == dict(model.named_buffers()).keys()
        assert all(torch.equal(buffers[fqn], value) for fqn, value in model.named_buffers())


@pytest.mark.parametrize("world_size", [2, 3])
def test_tied_weights_stay_tied_and_are_the_same_on_any_number_of_ranks(ranks: RankPool, world_size: int) -> None:
    """Which of the two modules gave them their values in an ordinary construction cannot be told."""
    like = snapshot(Tied())
    alone = join_params([ranks.run(_from_meta, 1, "tied")[0][0]], like)
    answers = ranks.run(_from_meta, world_size, "tied")
    joined = join_params([shards for shards, _, _ in answers], like)
    assert all(torch.equal(joined[fqn], value) for fqn, value in alone.items())
    assert all(are_ties_kept for _, _, are_ties_kept in answers)


def _most_with_values() -> int:
    """The largest number of whole parameters that had values when a unit was sharded."""
    with torch.device("meta"):
        model = Net(SmallBlock, num_blocks=6)
    whole = dict(model.named_parameters())
    counts = []
    shard_unit = engine_module.shard_unit

    def counting(*args: Any) -> Any:
        counts.append(sum(not param.is_meta and param.numel() > 0 for param in whole.values()))
        return shard_unit(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "shard_unit", counting)
        shard(model)
    return max(counts)


def test_no_rank_ever_holds_more_than_one_block_and_the_root_unit_whole(ranks: RankPool) -> None:
    in_a_block, in_the_root_unit = len(list(SmallBlock().parameters())), 4
    assert max(ranks.run(_most_with_values, 2)) <= in_a_block + in_the_root_unit


class WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def _refused() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), WithoutReset())
    with pytest.raises(ValueError, match="meta") as caught:
        shard(model)
    assert all(param.is_meta for param in model.parameters()), "nothing was allocated"
    return str(caught.value)


def test_a_module_that_cannot_initialise_itself_is_named(ranks: RankPool) -> None:
    for message in ranks.run(_refused, 2):
        assert "`1` (WithoutReset)" in message
        assert "'scale'" in message
        assert "reset_parameters" in message


def _mixed() -> tuple[Tensor, bool]:
    """A loaded part keeps its values when the rest is initialised."""
    loaded = nn.Linear(WIDTH, WIDTH)
    nn.init.constant_(loaded.weight, 7.0)
    with torch.device("meta"):
        model = Net(SmallBlock)
    model.blocks[1].linear = loaded
    engine = shard(model)
    out = model(torch.ones(2, 3, 5, device=CPU))
    out.mean().backward()
    (param,) = [param for param in engine.params if param.fqn == "blocks.1.linear.weight"]
    return param.local.clone(), bool(torch.isfinite(out).all())


def test_what_has_values_already_keeps_them(ranks: RankPool) -> None:
    for weight, is_finite in ranks.run(_mixed, 2):
        assert torch.equal(weight, torch.full_like(weight, 7.0))
        assert is_finite
