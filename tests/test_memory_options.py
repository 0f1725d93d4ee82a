"""Options that trade memory for time: caps on units, and units that stay unsharded between forward and backward."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_strategy.engine import UnitState
from fsdp_strategy.engine.unit_cap import fit_to_cap, unit_nbytes
from fsdp_strategy.engine.units import UnitPlan, divide, select_units
from tests.engine_cases import (
    NUM_BLOCKS,
    Net,
    SmallBlock,
    Trained,
    assert_close,
    assert_equal,
    batches,
    join_params,
    loss_of,
    rank_batches,
    seeded,
    shard,
    small_net,
    snapshot,
    train,
    unsharded_nbytes,
)
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

KIB = 1024


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """16 KiB in each matrix of the MLP, 4 KiB in `mix`, a little in the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(32), nn.Linear(32, 32, bias=False), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.mix(self.norm(x)))


class Language(nn.Module):
    """An embedding and a head of 64 KiB each around blocks, and a small bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(512, 32), nn.Linear(32, 512, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.bias
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _capped(cap_kib: float, model: nn.Module | None = None) -> dict[str, float]:
    """KiB of every unit."""
    model = model or Language()
    plans = fit_to_cap(select_units(model), cap_kib * KIB, lambda selected: divide(model, selected))
    return {plan.fqn: unit_nbytes(plan) / KIB for plan in plans}


def _fqns(plans: Sequence[UnitPlan]) -> list[str]:
    return [site.fqn for plan in plans for site in plan.params]


def test_units_that_fit_and_are_not_tiny_stay_as_they_are() -> None:
    assert list(_capped(400)) == ["", "blocks.0", "blocks.1", "blocks.2"]


def test_units_that_are_tiny_beside_the_cap_become_one() -> None:
    assert list(_capped(1000)) == [""]


def test_embedding_and_head_become_units_of_their_own() -> None:
    sizes = _capped(100)
    assert sizes["embedding"] == sizes["head"] == 64
    assert sizes[""] < 1
    assert "blocks.0.mlp" not in sizes


def test_a_block_over_the_cap_is_split_into_the_modules_inside_it() -> None:
    sizes = _capped(34)
    assert 32 < sizes["blocks.0.mlp"] < 34
    assert sizes["blocks.0.mix"] == 4
    assert "blocks.0.norm" not in sizes, "it is tiny, and stays with its block"
    sizes = _capped(20)
    assert 16 < sizes["blocks.1.mlp.up"] < 17
    assert sizes["embedding"] == 64, "a single module cannot be split"


@pytest.mark.parametrize("cap_kib", [1, 5, 17, 33, 34, 36, 64, 70, 150])
def test_every_parameter_is_in_one_unit_under_any_cap(cap_kib: float) -> None:
    model = Language()
    plans = fit_to_cap(select_units(model), cap_kib * KIB, lambda selected: divide(model, selected))
    assert sorted(_fqns(plans)) == sorted(fqn for fqn, _ in model.named_parameters())
    for plan in plans:
        assert unit_nbytes(plan) <= cap_kib * KIB or len({id(owner) for s in plan.params for owner, _ in s.sites}) == 1


def test_weights_that_a_parent_reads_are_not_units() -> None:
    model = nn.Sequential(nn.MultiheadAttention(32, 2), nn.MultiheadAttention(32, 2))
    assert "0.out_proj" not in _capped(1, model)


def _train_with(config: dict[str, Any], num_steps: int = 4) -> tuple[Trained, list[int], int]:
    """What is trained; gathers, reductions and the peak of unsharded bytes in the last step; what is left of them."""
    model = seeded(lambda: Net(SmallBlock))
    engine = shard(model, **config)
    data = rank_batches(engine, batches(num_steps))
    train(model, data[:-1])
    with engine.record() as recorder:
        loss_of(model, data[-1]).backward()
    counts = [recorder.count("all_gather"), recorder.count("reduce_scatter"), recorder.peak_nbytes["unsharded_param"]]
    return snapshot(model), counts, unsharded_nbytes(engine)


@both_layouts
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kept", [{"blocks.*": False}, {"blocks.*": False, "blocks.1": True}, {}], ids=str)
def test_units_that_stay_are_gathered_once(ranks: RankPool, world_size: int, kept: dict[str, bool]) -> None:
    reference = snapshot(seeded(lambda: Net(SmallBlock)))
    plain = ranks.run(_train_with, world_size, {})
    config = {"reshard_after_forward": kept or False}
    staying = ranks.run(_train_with, world_size, config)
    assert_equal(join_params([r for r, *_ in staying], reference), join_params([r for r, *_ in plain], reference))
    num_freed = 1 if "blocks.1" in kept else 0
    for (_, (gathers, reductions, peak), left), (_, (_, _, plain_peak), _) in zip(staying, plain, strict=True):
        assert (gathers, reductions) == (NUM_BLOCKS + 1 + num_freed, NUM_BLOCKS + 1)
        assert left == 0
        assert peak > plain_peak


def _freed_without_backward() -> list[str]:
    model = seeded(small_net)
    engine = shard(model, reshard_after_forward=False)
    with torch.no_grad():
        model(batches(1)[0][0])
    loss_of(model, batches(1)[0])
    states = [unit.state.name for unit in engine.units]
    engine.abandon()
    assert {unit.state for unit in engine.units} == {UnitState.SHARDED}
    with torch.no_grad(), engine.record() as recorder:
        model(batches(1)[0][0])
    held = max(event.live_nbytes["unsharded_param"] for event in recorder.of_kind("post_forward"))
    assert held < sum(unit.unsharded_nbytes for unit in engine.units)
    return states


@both_layouts
def test_they_stay_only_where_a_backward_follows(ranks: RankPool) -> None:
    assert ranks.run(_freed_without_backward, 2) == [["UNSHARDED"] * (NUM_BLOCKS + 1)] * 2


def _train_capped(unit_cap_mib: float | None) -> tuple[Trained, int]:
    model = seeded(Language)
    engine = shard(model, unit_cap_mib=unit_cap_mib)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + engine.mesh.shard_rank)
        tokens = torch.randint(512, (2, 4), generator=generator)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model), len(engine.units)


@both_layouts
def test_a_cap_changes_no_numbers(ranks: RankPool) -> None:
    reference = snapshot(seeded(Language))
    plain, capped = ranks.run(_train_capped, 2, None), ranks.run(_train_capped, 2, 20 / KIB)
    assert capped[0][1] > plain[0][1] == 4
    assert_close(join_params([r for r, _ in capped], reference), join_params([r for r, _ in plain], reference), 1e-6)


def _refused(config: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="Expected") as caught:
        shard(seeded(small_net), **config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"reshard_after_forward": {"layers.*": False}}, ["'layers.*'", "'blocks.0'"]),
        ({"unit_cap_mib": 0}, ["unit_cap_mib", "positive"]),
        ({"unit_cap_mib": -1.5}, ["unit_cap_mib", "-1.5"]),
        ({"reduce_wire": "bf16"}, ["'reduce_dtype', 'param_dtype'", "'bf16'"]),
    ],
)
def test_what_makes_no_sense_is_an_error(ranks: RankPool, config: dict[str, Any], words: list[str]) -> None:
    for message in ranks.run(_refused, 2, config):
        assert all(word in message for word in words), message
