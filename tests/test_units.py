"""Which parameters form a unit."""

import re
from collections import OrderedDict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fsdp_strategy.engine.units import UnitPolicy, find_units

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


class Tower(nn.Module):
    """A container of its own that runs its blocks."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(2, WIDTH), blocks, nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def _units(module: nn.Module, policy: UnitPolicy = "auto") -> dict[str, list[str]]:
    return {plan.fqn: [param.fqn for param in plan.params] for plan in find_units(module, policy)}


def _assert_complete(module: nn.Module, units: dict[str, list[str]]) -> None:
    listed = [fqn for fqns in units.values() for fqn in fqns]
    assert sorted(listed) == sorted(name for name, _ in module.named_parameters())


LISTS = {
    "ModuleList": lambda: nn.ModuleList([Block(), Block(), Block()]),
    "Sequential": lambda: nn.Sequential(Block(), Block(), Block()),
    "ModuleDict": lambda: nn.ModuleDict({"0": Block(), "1": Block(), "2": Block()}),
    "a list with something between": lambda: nn.ModuleList([Block(), Block(), Block(), nn.GELU(), nn.Identity()]),
}


@pytest.mark.parametrize("kind", LISTS)
def test_auto_makes_every_repeated_block_a_unit(kind: str) -> None:
    model = Model(LISTS[kind]())
    units = _units(model)
    assert list(units) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert units[""] == ["embed.weight", "embed.bias", "head.weight", "head.bias"]
    _assert_complete(model, units)


def test_auto_finds_the_blocks_of_a_sequential_model_and_leaves_no_root_unit() -> None:
    assert list(_units(nn.Sequential(Block(), Block()))) == ["0", "1"]


def test_auto_takes_the_outermost_repeated_blocks() -> None:
    units = _units(Model(nn.ModuleList([Tower(), Tower()])))
    assert list(units) == ["", "blocks.0", "blocks.1"]


def test_auto_descends_into_what_is_not_repeated() -> None:
    units = _units(Model(Tower(2)))
    assert list(units) == ["", "blocks.blocks.0", "blocks.blocks.1"]


def test_auto_leaves_blocks_in_the_root_unit_that_hold_little_of_the_model() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    model.table = nn.Embedding(10_000, WIDTH)
    assert list(_units(model)) == [""]
    _assert_complete(model, _units(model))


def test_auto_leaves_a_model_without_repeated_blocks_whole() -> None:
    assert list(_units(Block())) == [""]


def test_auto_does_not_take_blocks_of_different_classes_for_repeated_ones() -> None:
    assert list(_units(Model(nn.ModuleList([Block(), Tower(2)])))) == ["", "blocks.1.blocks.0", "blocks.1.blocks.1"]


def test_a_block_listed_twice_is_one_unit() -> None:
    block = Block()
    model = Model(nn.ModuleList([block, block]))
    units = _units(model)
    assert list(units) == ["", "blocks.0"]
    _assert_complete(model, units)
    (plan,) = (plan for plan in find_units(model) if plan.fqn == "blocks.0")
    assert all(len(param.sites) == 1 for param in plan.params), "the same place reached twice is one site"


SELECTIONS: list[tuple[str, UnitPolicy, list[str]]] = [
    ("class name", "Block", ["", "blocks.0", "blocks.1", "blocks.2"]),
    ("class path", f"{__name__}.Block", ["", "blocks.0", "blocks.1", "blocks.2"]),
    ("pattern", "blocks.[12]", ["", "blocks.1", "blocks.2"]),
    ("pattern of a whole tree", "blocks.0.*", ["", "blocks.0.norm", "blocks.0.up", "blocks.0.down"]),
    ("one fqn", "head", ["", "head"]),
    ("list", ["blocks.0", "head"], ["", "blocks.0", "head"]),
    ("list that selects twice", ["Block", "blocks.1"], ["", "blocks.0", "blocks.1", "blocks.2"]),
    ("predicate", lambda fqn, module: isinstance(module, Block) and fqn != "blocks.1", ["", "blocks.0", "blocks.2"]),
]


@pytest.mark.parametrize(("policy", "expected"), [s[1:] for s in SELECTIONS], ids=[s[0] for s in SELECTIONS])
def test_a_policy_selects_the_units(policy: UnitPolicy, expected: list[str]) -> None:
    model = Model(nn.ModuleList([Block(), Block(), Block()]))
    units = _units(model, policy)
    assert list(units) == expected
    _assert_complete(model, units)


@pytest.mark.parametrize("policy", ["Blok", ["Block", "decoder.*"]])
def test_a_name_that_matches_nothing_is_refused_with_the_candidates(policy: str | Sequence[str]) -> None:
    missing = policy if isinstance(policy, str) else policy[-1]
    with pytest.raises(ValueError, match=re.escape(repr(missing))) as error:
        find_units(Model(nn.ModuleList([Block(), Block()])), policy)
    for candidate in ("Block", "Linear", "LayerNorm", "'embed'"):
        assert candidate in str(error.value)


def test_a_predicate_that_selects_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="predicate that selects none"):
        find_units(Model(Block()), lambda fqn, module: False)


class OnlyHolds(nn.Module):
    """Without a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "container",
    [nn.ModuleList([Block()]), nn.ModuleDict({"a": Block()}), nn.ParameterList([torch.ones(2)]), OnlyHolds()],
    ids=lambda module: type(module).__name__,
)
def test_a_container_cannot_be_a_unit(container: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"`blocks` \\({type(container).__name__}\\)"):
        find_units(Model(container), "blocks")


def _owner(module: nn.Module, policy: UnitPolicy, fqn: str) -> tuple[str, int]:
    """The unit of a parameter, and at how many places the parameter is."""
    return next((plan.fqn, len(p.sites)) for plan in find_units(module, policy) for p in plan.params if p.fqn == fqn)


def test_a_head_tied_to_the_embedding_belongs_to_the_root_unit() -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(5, WIDTH), block=Block(), head=nn.Linear(WIDTH, 5)))
    model.head.weight = model.embed.weight
    assert _owner(model, ["Embedding", "Block", "Linear"], "embed.weight") == ("", 2)
    _assert_complete(model, _units(model, ["Embedding", "Block", "Linear"]))


def test_a_parameter_tied_inside_one_block_stays_in_its_unit() -> None:
    blocks = nn.ModuleList([Block(), Block()])
    blocks[1].down.bias = blocks[1].norm.bias
    assert _owner(Model(blocks), "auto", "blocks.1.norm.bias") == ("blocks.1", 2)


def test_a_parameter_tied_across_two_blocks_belongs_to_the_root_unit() -> None:
    blocks = nn.ModuleList([Block(), Block(), Block()])
    blocks[2].up.weight = blocks[0].up.weight
    assert _owner(Model(blocks), "auto", "blocks.0.up.weight") == ("", 2)
    _assert_complete(Model(blocks), _units(Model(blocks)))


def test_a_parameter_tied_between_nested_units_belongs_to_their_common_unit() -> None:
    model = Model(nn.ModuleList([Tower(2), Tower(2)]))
    towers = model.blocks
    towers[0].blocks[1].up.weight = towers[0].blocks[0].up.weight
    towers[1].blocks[1].up.weight = towers[1].blocks[0].up.weight = towers[1].blocks[0].down.weight
    towers[1].blocks[0].norm.bias = towers[0].blocks[0].norm.bias
    policy = ["Tower", "blocks.0.blocks.*"]
    assert _owner(model, policy, "blocks.0.blocks.0.up.weight") == ("blocks.0", 2)
    assert _owner(model, policy, "blocks.1.blocks.0.up.weight") == ("blocks.1", 3)
    assert _owner(model, policy, "blocks.0.blocks.0.norm.bias") == ("", 2)
    _assert_complete(model, _units(model, policy))


def test_a_module_shared_by_two_blocks_belongs_to_the_root_unit() -> None:
    blocks = nn.ModuleList([Block(), Block()])
    blocks[1].norm = blocks[0].norm
    assert _owner(Model(blocks), "auto", "blocks.0.norm.weight") == ("", 1)
    _assert_complete(Model(blocks), _units(Model(blocks)))


def test_nested_units_each_keep_what_lies_in_no_inner_unit() -> None:
    units = _units(Model(nn.ModuleList([Block(), Block()])), ["Block", "blocks.*.up"])
    assert units["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert [fqn.split(".")[2] for fqn in units["blocks.0"]] == ["norm", "norm", "down", "down"]


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up = nn.MultiheadAttention(WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.attention(x, x, x)[0])


@pytest.mark.parametrize(
    "policy",
    ["Linear", ["Linear", "NonDynamicallyQuantizableLinear"], lambda fqn, module: isinstance(module, nn.Linear)],
    ids=["class", "both classes", "predicate"],
)
def test_weights_that_attention_reads_without_a_call_stay_with_its_parent(policy: UnitPolicy) -> None:
    model = nn.Sequential(AttentionBlock(), AttentionBlock())
    units = _units(model, policy)
    assert list(units) == ["", "0.up", "1.up"]
    assert {"0.attention.out_proj.weight", "1.attention.out_proj.bias"} <= set(units[""])


def test_units_come_in_the_order_of_the_module_tree() -> None:
    fqns = list(_units(Model(nn.ModuleList([Block(), Block()])), ["head", "blocks.1", "embed", "blocks.0"]))
    assert fqns == ["embed", "blocks.0", "blocks.1", "head"]


def test_finding_units_changes_nothing() -> None:
    model = Model(nn.ModuleList([Block(), Block()]))
    before = {name: (id(param), param.detach().clone()) for name, param in model.named_parameters()}
    find_units(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(id(after[name]) == key and torch.equal(after[name], value) for name, (key, value) in before.items())
