"""However modules are called and whatever they return, training equals that of plain replicas; see `tests.kinds`.

What blocks may take and return is listed in `test_engine_outputs`, and runs here on three ranks.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from tests.engine_cases import WIDTH, Batch, Net, SmallBlock, batches, loss_of, seeded, shard, small_net
from tests.kinds import Kind, assert_trains_as_twin
from tests.layouts import both_layouts
from tests.rank_pool import RankPool
from tests.test_engine_outputs import BUILDS

pytestmark = both_layouts


# -- which blocks are called, and how often ---------------------------------------------------------------------------

Path = Callable[[int, int], Sequence[int]]  # of step and rank: the blocks to call, in order

PATHS: dict[str, Path] = {
    "several times": lambda step, rank: (0, 1, 1, 0, 2, 0),
    "out of order": lambda step, rank: (2, 0, 1),
    "in another order every step": lambda step, rank: [(i * (step + 1)) % 4 % 3 for i in range(4)],
    "a different number of times every step": lambda step, rank: (0,) * (3 - step) + (1,) * step,
    "a different number of times on every rank": lambda step, rank: (0, 1) + (1,) * rank + (2,) * (step % 2),
    "not at all on some steps": lambda step, rank: (0, 1, 2) if step % 2 else (1,),
    "not at all on some ranks": lambda step, rank: (0, 1, 2) if rank == step % 2 else (1,),
    "none on one rank": lambda step, rank: () if rank == 1 else (0, 1, 2),
    "none on all ranks but one": lambda step, rank: (2, 1, 0) if rank == 0 else (),
}


def _loss_along(path: Path) -> Callable[[Net, Batch, int], Tensor]:
    def loss(model: Net, batch: Batch, step: int) -> Tensor:
        x = model.stem(batch[0])
        for index in path(step, dist.get_rank()):
            x = model.blocks[index](x)
        return (model.head(x) - batch[1]).square().mean()

    return loss


class Experts(nn.Module):
    """Sends each sample to one expert. An expert without samples is called with none, or not called.

    On every rank another expert goes without, and in one step all ranks leave out the same one.
    """

    def __init__(self, calls_idle: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(SmallBlock() for _ in range(3))
        self.calls_idle = calls_idle
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        idle = (dist.get_rank() if self.step != 2 else 1) % 3
        weights = self.gate(x.mean(1)).softmax(-1)
        chosen = torch.arange(len(x)) % 3
        chosen = torch.where(chosen == idle, (idle + 1) % 3, chosen)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            if len(rows) or self.calls_idle:
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None, None])
        return self.head(out)


def _experts_loss(model: Experts, batch: Batch, step: int) -> Tensor:
    model.step = step
    return loss_of(model, batch)


# -- ways to call -----------------------------------------------------------------------------------------------------


class Methods(Net):
    """Is never called itself."""

    def __init__(self) -> None:
        super().__init__(SmallBlock)
        self.bottleneck = nn.Parameter(torch.randn(WIDTH) / 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.stem(x)) * self.bottleneck

    def decode(self, z: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[1](z)))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("Nobody calls it.")


def _encoded_loss(model: Methods, batch: Batch, step: int) -> Tensor:
    z = model.encode(batch[0])
    return (model.decode(z) - batch[1]).square().mean() + 0.01 * z.square().mean()


class TwoWays(SmallBlock):
    """A block with another method than `forward`."""

    def attend(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(-1)


def _method_loss(model: Net, batch: Batch, step: int) -> Tensor:
    x = model.stem(batch[0])
    for block in model.blocks:
        x = block(x) * block.attend(x)
    return (model.head(x) - batch[1]).square().mean()


def _submodules_loss(model: Net, batch: Batch, step: int) -> Tensor:
    """Parts of blocks are called, in another order than the blocks would."""
    x = model.stem(batch[0])
    for block in reversed(model.blocks):
        x = x + block.linear(x).tanh()
    x = model.blocks[step % 3](x)
    for block in model.blocks:
        x = block.norm(x)
    return (model.head(x) - batch[1]).square().mean()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SmallBlock(), SmallBlock()
        self.mix = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.mix) + self.mix


def _nested_loss(model: Net, batch: Batch, step: int) -> Tensor:
    x = model.stem(batch[0])
    x = model.blocks[0].second(x)  # an inner unit alone
    for block in model.blocks:
        x = block(x)
    return (model.head(model.blocks[1].first(x)) - batch[1]).square().mean()


class Named(nn.Module):
    """Blocks in a ModuleDict, a ModuleList of ModuleLists and a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)
        self.named = nn.ModuleDict({"b": SmallBlock(), "a": SmallBlock()})
        self.grid = nn.ModuleList(nn.ModuleList(SmallBlock() for _ in range(2)) for _ in range(2))
        self.rest = nn.Sequential(SmallBlock(), nn.Tanh(), SmallBlock())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in ("a", "b"):
            x = self.named[name](x)
        for row in self.grid:
            x = row[1](x) + row[0](x)
        return self.head(self.rest(x))


class Mixed(SmallBlock):
    """Takes positional and keyword arguments, containers, None and numbers."""

    def forward(self, x: Tensor, extra: Any = None, *others: Any, scale: Any = 1.0, **named: Any) -> Tensor:  # type: ignore[override]
        for value in (*others, *named.values()):
            x = x + 0.1 * value["hint"][0] if isinstance(value, dict) else x * value
        return super().forward(x if extra is None else x + extra) * scale


def _mixed_loss(model: Net, batch: Batch, step: int) -> Tensor:
    x = model.stem(batch[0])
    x = model.blocks[0](x, None, 1.1, scale=x.mean().tanh(), hints={"hint": [x]})
    x = model.blocks[1](x=x, extra=x.detach())
    x = model.blocks[2](x, x, {"hint": (x,)})
    return (model.head(x) - batch[1]).square().mean()


class Storing(SmallBlock):
    """Returns nothing: writes its result where it was told to."""

    def forward(self, store: dict[str, Tensor]) -> None:  # type: ignore[override]
        store["x"] = super().forward(store["x"])


def _stored_loss(model: Net, batch: Batch, step: int) -> Tensor:
    store = {"x": model.stem(batch[0])}
    for block in model.blocks:
        assert block(store) is None
    return (model.head(store["x"]) - batch[1]).square().mean()


class Features(NamedTuple):
    x: Tensor
    aux: list[Tensor]


class Hooked(Net):
    """A hook of the user keeps what a block gives; another replaces what it takes."""

    def __init__(self) -> None:
        super().__init__(SmallBlock)
        self.kept: list[Tensor] = []
        self.blocks[1].register_forward_hook(lambda module, args, output: self.kept.append(output))
        self.blocks[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
        self.blocks[0].linear.register_forward_hook(lambda module, args, output: output * 0.9)

    def forward(self, x: Tensor) -> Features:
        self.kept.clear()
        x = super().forward(x)
        return Features(x, list(self.kept))


def _features_loss(model: Hooked, batch: Batch, step: int) -> Tensor:
    out = model(batch[0])
    return (out.x - batch[1]).square().mean() + 0.1 * sum(kept.square().mean() for kept in out.aux)


def _without_stem_loss(model: Net, batch: Batch, step: int) -> Tensor:
    """The first block's input carries no gradient, nor does the second's."""
    x = batch[0].repeat(1, 1, 3)[..., :WIDTH]
    x = model.blocks[1](model.blocks[0](x).detach())
    return (model.head(model.blocks[2](x)) - batch[1]).square().mean() + model.stem(batch[0]).square().mean()


# -- teachers, copies, other parameters -------------------------------------------------------------------------------


class Pair(nn.Module):
    """A student, and a teacher that nothing trains."""

    def __init__(self, *, teacher: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.student = small_net()
        self.teacher = teacher(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)


def _distilled_loss(model: Pair, batch: Batch, step: int) -> Tensor:
    with torch.no_grad():
        target = model.teacher.eval()(batch[0])
    return loss_of(model.student, batch) + (model.student(batch[0]) - target).square().mean()


@torch.no_grad()
def _follow_softly(model: Pair, step: int) -> None:
    for target, online in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        target.lerp_(online, 0.3)


@torch.no_grad()
def _follow_by_data(model: Pair, step: int) -> None:
    for target, online in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        target.data = target.data * 0.5 + online.data * 0.5


def _follow_by_loading(model: Pair, step: int) -> None:
    if step % 2:
        model.teacher.load_state_dict(model.student.state_dict())


def _reference_loss(model: Net, batch: Batch, step: int) -> Tensor:
    """The model is its own reference: called without gradients, with them, and in evaluation in between."""
    with torch.no_grad():
        before = model(batch[0])
    out = model(batch[0])
    with torch.inference_mode():
        model.eval()(batch[0])
    return (out - batch[1]).square().mean() + (out - 0.5 * before).square().mean() + loss_of(model.train(), batch)


def _copied_loss(model: Net, batch: Batch, step: int) -> Tensor:
    """A deep copy made in the step, frozen where it is."""
    twin = copy.deepcopy(model.blocks)
    x = model.stem(batch[0])
    with torch.no_grad():
        target = x
        for block in twin:
            target = block(target)
    for block in model.blocks:
        x = block(x)
    return (model.head(x) - batch[1]).square().mean() + (x - 0.5 * target).square().mean()


def _functional_loss(model: Net, batch: Batch, step: int) -> Tensor:
    """The model with other values for its parameters, through which gradients reach its own."""
    scaled = {fqn: param * (1 + 0.1 * step) for fqn, param in model.named_parameters()}
    return (functional_call(model, scaled, (batch[0],)) - batch[1]).square().mean() + loss_of(model, batch)


def _functional_block_loss(model: Net, batch: Batch, step: int) -> Tensor:
    x = model.stem(batch[0])
    for block in model.blocks:
        x = functional_call(block, {"linear.bias": block.linear.bias.sin()}, (x,))
    return (model.head(x) - batch[1]).square().mean()


KINDS: dict[str, Kind] = {
    **{f"called {name}": Kind(loss=_loss_along(path)) for name, path in PATHS.items()},
    "experts without samples are called": Kind(build=lambda: Experts(True), loss=_experts_loss),
    "experts without samples are not called": Kind(build=lambda: Experts(False), loss=_experts_loss),
    "only methods of the model": Kind(build=Methods, loss=_encoded_loss),
    "a method of a block": Kind(build=lambda: Net(TwoWays), loss=_method_loss),
    "submodules of blocks": Kind(loss=_submodules_loss),
    "nested units": Kind(build=lambda: Net(Outer), loss=_nested_loss, units=["Outer", "SmallBlock"]),
    "units three deep": Kind(build=lambda: Net(Outer), loss=_nested_loss, units=["Outer", "SmallBlock", "Linear"]),
    "named, listed and in sequence": Kind(build=Named),
    "arguments of all sorts": Kind(build=lambda: Net(Mixed), loss=_mixed_loss),
    "returns None": Kind(build=lambda: Net(Storing), loss=_stored_loss),
    "hooks of the user and a named tuple": Kind(build=Hooked, loss=_features_loss),
    "inputs without gradients": Kind(loss=_without_stem_loss),
    "a teacher": Kind(build=lambda: Pair(teacher=lambda student: seeded(small_net, 5)), loss=_distilled_loss),
    "a copy that follows": Kind(
        build=lambda: Pair(teacher=copy.deepcopy), loss=_distilled_loss, between=_follow_softly
    ),
    "a copy whose data is set": Kind(
        build=lambda: Pair(teacher=copy.deepcopy), loss=_distilled_loss, between=_follow_by_data
    ),
    "a copy that loads": Kind(
        build=lambda: Pair(teacher=copy.deepcopy), loss=_distilled_loss, between=_follow_by_loading
    ),
    "its own reference": Kind(loss=_reference_loss),
    "copied in the step": Kind(loss=_copied_loss),
    "functional_call of the model": Kind(loss=_functional_loss),
    "functional_call of blocks": Kind(loss=_functional_block_loss),
}


def _train(name: str) -> None:
    assert_trains_as_twin(KINDS[name])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_way_of_calling_trains_as_in_plain_replicas(ranks: RankPool, world_size: int, name: str) -> None:
    with ranks.timeout(20):
        ranks.run(_train, world_size, name)


def _train_block(name: str) -> None:
    assert_trains_as_twin(Kind(build=BUILDS[name], units=["OwnWeight"] if "its weight" in name else "auto"))


@pytest.mark.parametrize("name", BUILDS)
def test_whatever_blocks_take_and_return_trains_as_in_plain_replicas(ranks: RankPool, name: str) -> None:
    with ranks.timeout(20):
        ranks.run(_train_block, 3, name)


# -- generation -------------------------------------------------------------------------------------------------------


def _generate(model: Net, x: Tensor, num_tokens: int) -> Iterator[Tensor]:
    """Calls the model for every token; the number of tokens is the rank's own."""
    for _ in range(num_tokens):
        x = torch.cat([x, model(x)[:, -1:].expand(-1, 1, 5)], dim=1)[:, 1:]
        yield x[:, -1]


def _validate(lengths: Sequence[Sequence[int]]) -> None:
    model, plain = seeded(small_net), seeded(small_net)
    engine = shard(model)
    for step, (x, _) in enumerate(batches(len(lengths))):
        with engine.iteration("validation"), torch.no_grad():
            tokens = list(_generate(model, x, lengths[step][dist.get_rank()]))
        with torch.no_grad():
            expected = list(_generate(plain, x, lengths[step][dist.get_rank()]))
        assert len(tokens) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(tokens, expected, strict=True))


@pytest.mark.parametrize(
    "lengths",
    [[(3, 1), (1, 4), (0, 2), (2, 2)], [(1, 2, 5), (4, 0, 1), (0, 0, 3), (2, 2, 2)]],
    ids=["2 ranks", "3 ranks"],
)
def test_ranks_may_generate_different_numbers_of_tokens(ranks: RankPool, lengths: list[tuple[int, ...]]) -> None:
    with ranks.timeout(20):
        ranks.run(_validate, len(lengths[0]), lengths)
