"""Whatever a block takes and returns, its gradients are those of the plain module, and nothing stays unsharded.

Every case is a model with a way to compute its loss. Two ranks take two steps with it, the first negotiated and the
second scheduled; the reference runs both ranks' rows in one process and averages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine_cases import (
    WIDTH,
    Batch,
    Net,
    SmallBlock,
    Trained,
    assert_close,
    average_grads,
    batches,
    join_grads,
    join_params,
    loss_of,
    make_optimizer,
    most_unsharded_blocks,
    rows_of,
    seeded,
    shard,
    snapshot,
    unsharded_nbytes,
)
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts

NUM_STEPS = 2
# What is reduced in parts is rounded once a part, 2**-24 each; a gradient lost or counted twice is off by over 1e-3.
TOLERANCE = 1e-6


@dataclass
class Parts:
    kept: Tensor
    spare: Tensor | None
    count: int = 0


class Opaque:
    """Holds a tensor where nobody can see it."""

    def __init__(self, value: Tensor) -> None:
        self._values = {value.dim(): value}.__getitem__
        self.dim = value.dim()

    def value(self) -> Tensor:
        return self._values(self.dim)


class Wrapped(SmallBlock):
    """A block with `wrap` around its output, which the model takes off with `unwrap`."""

    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x))


class WrappedNet(Net):
    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__(lambda: Wrapped(wrap, unwrap))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block.unwrap(block(x))
        return self.head(x)


WRAPPINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda y: {"y": y, "n": 1}, lambda out: out["y"]),
    "tuple": (lambda y: (y, None, y.sum()), lambda out: out[0] + 0.01 * out[2]),
    "nested": (lambda y: [{"deep": (y,)}], lambda out: out[0]["deep"][0]),
    "dataclass": (lambda y: Parts(y, None), lambda out: out.kept),
    "an output that is not used": (lambda y: (y, (3 * y).exp()), lambda out: out[0]),
    "an output without gradient": (lambda y: (y, y.detach().sum()), lambda out: out[0] * (1 + 0.01 * out[1].tanh())),
    "view": (lambda y: y[:, :, :], lambda out: out),
    "transposed view": (lambda y: y.transpose(1, 2), lambda out: out.transpose(1, 2)),
    "chunks": (lambda y: y.chunk(2, dim=-1), lambda out: torch.cat(out, dim=-1)),
    "changed in place": (lambda y: y, lambda out: out.mul_(1.5).add_(0.1)),
    "a view changed in place": (lambda y: y.view(-1), lambda out: out.mul_(1.5).view(-1, 3, WIDTH)),
    "an output detached": (lambda y: y, lambda out: out.detach() + 0 * out),
    "opaque": (Opaque, Opaque.value),
}


class Called(Net):
    """A net whose `call` says how blocks are called."""

    def __init__(self, call: Callable[[nn.ModuleList, Tensor], Tensor], block: Callable[[], nn.Module] = SmallBlock):
        super().__init__(block)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(self.blocks, self.stem(x)))


class KeywordBlock(SmallBlock):
    def forward(self, *, states: dict[str, Tensor], scale: float | Tensor = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(states["x"]) * scale


class InPlaceBlock(SmallBlock):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(torch.tanh(self.linear(self.norm(x.clone()))))


class CheckpointedBlock(SmallBlock):
    """Recomputes its inside."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant) * 1.1


class OwnWeight(nn.Module):
    """Returns a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight.t()


def _chain(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _checkpointed(*, use_reentrant: bool) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    def call(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return call


def _checkpointed_pair(*, use_reentrant: bool) -> Callable[[nn.ModuleList, Tensor], Tensor]:
    def call(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: blocks[1](blocks[0](y)), x, use_reentrant=use_reentrant)
        return blocks[2](x)

    return call


def _checkpointed_twice(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in (*blocks, blocks[0]):
        x = checkpoint(block, x, use_reentrant=False)
    return x


def _keywords(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(states={"x": x}, scale=x.mean().tanh())
    return x


def _three_times(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return blocks[2](blocks[0](blocks[1](blocks[0](blocks[0](x)))))


def _in_parallel(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return blocks[0](x) + blocks[1](x) * blocks[2](x)


def _one_result_unused(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    blocks[1](x)
    return blocks[2](blocks[0](x))


def _returns_a_weight(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        y, weight = block(x)
        x = x + y @ weight
    return x


def _without_gradient_inside(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.no_grad():
        hint = blocks[1](x)
    return blocks[2](blocks[1](blocks[0](x) + hint))


def _block_listed_twice() -> Net:
    net = Net(SmallBlock)
    net.blocks = nn.ModuleList([net.blocks[0], net.blocks[1], net.blocks[0]])
    return net


def _no_root_unit() -> nn.Module:
    return nn.Sequential(*(SmallBlock(5) for _ in range(3)))


class CheckpointedWhole(nn.Module):
    """All of it is one call to recompute, and there is no root unit."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = _no_root_unit(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x.clone().requires_grad_(), use_reentrant=self.use_reentrant)


class LSTMBlock(nn.Module):
    """A layer that also keeps its parameters in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class LowRankBlock(nn.Module):
    """Frozen weights that are still read after the last trainable gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + torch.tanh(self.linear(h) + self.up(self.down(h)))


def _watched_by_user() -> Net:
    net = Net(SmallBlock)
    for block in net.blocks:
        block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.01,))
    return net


CALLS: dict[str, Callable[[], nn.Module]] = {
    "keywords": lambda: Called(_keywords, KeywordBlock),
    "called three times": lambda: Called(_three_times),
    "called in parallel": lambda: Called(_in_parallel),
    "listed twice": _block_listed_twice,
    "result unused": lambda: Called(_one_result_unused),
    "input changed in place": lambda: Called(_chain, InPlaceBlock),
    "called once without gradient": lambda: Called(_without_gradient_inside),
    "returns its weight": lambda: Called(_returns_a_weight, OwnWeight),
    "no root unit": _no_root_unit,
    "keeps parameters in a list": lambda: Called(_chain, LSTMBlock),
    "a low-rank adapter": lambda: Called(_chain, LowRankBlock),
    "full backward hooks": _watched_by_user,
}

CHECKPOINTS: dict[str, Callable[[], nn.Module]] = {
    f"{where}, {'re-entrant' if use_reentrant else 'non-re-entrant'}": build
    for use_reentrant in (False, True)
    for where, build in {
        "around a block": lambda r=use_reentrant: Called(_checkpointed(use_reentrant=r)),
        "around two blocks": lambda r=use_reentrant: Called(_checkpointed_pair(use_reentrant=r)),
        "inside a block": lambda r=use_reentrant: Called(_chain, lambda: CheckpointedBlock(r)),
        "around everything": lambda r=use_reentrant: CheckpointedWhole(r),
    }.items()
}
CHECKPOINTS["a block called twice, non-re-entrant"] = lambda: Called(_checkpointed_twice)

BUILDS: dict[str, Callable[[], nn.Module]] = {
    **{f"output: {name}": lambda pair=pair: WrappedNet(*pair) for name, pair in WRAPPINGS.items()},
    **{f"call: {name}": build for name, build in CALLS.items()},
    **{f"checkpoint: {name}": build for name, build in CHECKPOINTS.items()},
}


def _steps(model: nn.Module, world_size: int) -> Trained:
    """In one process, both ranks' rows."""
    optimizer = make_optimizer("sgd", model.parameters())
    losses = []
    for batch in batches(NUM_STEPS):

        def run(rank: int, batch: Batch = batch) -> None:
            loss = loss_of(model, rows_of(batch, rank, world_size))
            loss.backward()
            losses.append(loss.item())

        average_grads(model, run, world_size)
        optimizer.step()
    return snapshot(model, losses)


def _sharded_steps(name: str) -> tuple[Trained, int, int]:
    """What training leaves, what is unsharded after a backward, and how many blocks were unsharded at one time."""
    model = seeded(BUILDS[name])
    engine = shard(model, units=["OwnWeight"] if "its weight" in name else "auto", prefetch_limit=0)
    optimizer = make_optimizer("sgd", model.parameters())
    losses, nbytes_left, num_unsharded = [], 0, 0
    for batch in batches(NUM_STEPS):
        optimizer.zero_grad()
        with engine.record() as recorder:
            loss = loss_of(model, rows_of(batch, dist.get_rank(), 2))
            loss.backward()
        nbytes_left = max(nbytes_left, unsharded_nbytes(engine))
        num_unsharded = max(num_unsharded, most_unsharded_blocks(recorder))
        optimizer.step()
        losses.append(loss.item())
    return snapshot(model, losses), nbytes_left, num_unsharded


# Without prefetch one block is unsharded at a time, except where a block's backward cannot be told from outside, where
# several blocks are needed at once, or where a recomputation brings back all that it runs.
UNSHARDED_AT_ONCE = {"opaque": 3, "returns its weight": 3, "in parallel": 3, "around two blocks": 2, "everything": 3}


@pytest.mark.parametrize("name", BUILDS)
def test_gradients_are_right_whatever_blocks_take_and_return(ranks: RankPool, name: str) -> None:
    reference = _steps(seeded(BUILDS[name]), 2)
    with ranks.timeout(10):
        answers = ranks.run(_sharded_steps, 2, name)
    results = [result for result, _, _ in answers]
    assert_close(join_params(results, reference), reference.params, TOLERANCE)
    assert_close(join_grads(results, reference), reference.grads, TOLERANCE)
    assert [nbytes for _, nbytes, _ in answers] == [0, 0], "nothing stays unsharded after backward"
    most = next((count for part, count in UNSHARDED_AT_ONCE.items() if part in name), 1)
    assert [count for _, _, count in answers] == [most, most], "blocks are freed as early as can be"
