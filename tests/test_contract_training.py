"""The FSDP2 contract on training: slow ranks, recomputation, frozen and low-precision parameters, empty calls."""

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_strategy.engine import EngineConfig, FullyShardedEngine, ShardMesh
from tests import layouts
from tests.engine_cases import (
    CPU,
    WIDTH,
    Batch,
    Net,
    SmallBlock,
    Trained,
    assert_equal,
    batches,
    loss_of,
    make_optimizer,
    rank_batches,
    seeded,
    shard,
    small_net,
    snapshot,
)
from tests.kinds import Kind, assert_trains_as_twin
from tests.layouts import both_layouts
from tests.models import dealt_loader
from tests.pooled_trainer import make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

two_and_three_ranks = pytest.mark.parametrize("world_size", [2, 3])


# -- parity with plain replicas ---------------------------------------------------------------------------------------


class Inputless(nn.Module):
    """Its forward and those of its blocks take nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Table() for _ in range(2))
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self) -> Tensor:
        return (self.blocks[0]() @ self.blocks[1]().t()).mean() * self.scale.sum()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self) -> Tensor:
        return self.weight.sin()


class Nested(nn.Module):
    """A unit with two units inside, recomputed as a whole or in part."""

    def __init__(self, recomputes: str) -> None:
        super().__init__()
        self.first, self.second = SmallBlock(), SmallBlock()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        first = checkpoint(self.first, x, use_reentrant=False) if self.recomputes == "inside" else self.first(x)
        return self.second(first) * self.gain


class Preferred(nn.Module):
    """Two forwards before one backward, as preference optimization does, with recomputation."""

    def __init__(self, recomputes: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Nested(recomputes) for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes == "around" else block(x)
        return self.head(x)


def _preference_loss(model: nn.Module, batch: Batch, step: int) -> Tensor:
    chosen, rejected = model(batch[0]), model(-batch[0])
    with torch.no_grad():
        reference = model(batch[0])
    return -nn.functional.logsigmoid(chosen - rejected).mean() + (chosen - 0.5 * reference - batch[1]).square().mean()


class TiedRecomputed(nn.Module):
    """An embedding whose weight is the head's, around recomputed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x.abs().sum(-1) * 3).long() % 7)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x).mean(-1, keepdim=True)


class Low(SmallBlock):
    """A frozen float8 weight beside trainable float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.low.float()).tanh()


def _list() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(5, WIDTH), SmallBlock(), SmallBlock(), nn.Linear(WIDTH, 1)])


def _loss_of_list(model: nn.ModuleList, batch: Batch, step: int) -> Tensor:
    x = batch[0]
    for module in model:
        x = module(x)
    return (x - batch[1]).square().mean()


def _half_frozen_several_times(model: Net, batch: Batch, step: int) -> Tensor:
    x = model.stem(batch[0])
    for block in (*model.blocks, model.blocks[0], model.blocks[1]):
        x = block(x)
    return (model.head(x) - batch[1]).square().mean()


def _half_frozen() -> Net:
    net = small_net()
    for block in net.blocks:
        block.linear.requires_grad_(False)
    return net


KINDS: dict[str, Kind] = {
    "no inputs": Kind(build=Inputless, loss=lambda model, batch, step: model() * batch[0].mean()),
    "two forwards, nested": Kind(
        build=lambda: Preferred("nowhere"), loss=_preference_loss, units=["Nested", "SmallBlock"]
    ),
    "two forwards, nested, recomputed": Kind(
        build=lambda: Preferred("around"), loss=_preference_loss, units=["Nested", "SmallBlock"]
    ),
    "two forwards, nested, recomputed inside": Kind(
        build=lambda: Preferred("inside"), loss=_preference_loss, units=["Nested", "SmallBlock"]
    ),
    "tied and recomputed": Kind(build=TiedRecomputed),
    "float8 beside float32": Kind(build=lambda: Net(Low)),
    "a ModuleList is the whole model": Kind(build=_list, loss=_loss_of_list),
    "half frozen, called several times": Kind(build=_half_frozen, loss=_half_frozen_several_times),
}


def _train(name: str) -> None:
    assert_trains_as_twin(KINDS[name])


@pytest.mark.parametrize("name", KINDS)
@two_and_three_ranks
def test_training_equals_that_of_plain_replicas(ranks: RankPool, world_size: int, name: str) -> None:
    with ranks.timeout(20):
        ranks.run(_train, world_size, name)


# -- slow ranks -------------------------------------------------------------------------------------------------------


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


def _train_delayed(where: str, native: bool) -> Trained:
    """Rank 0 is late in odd steps, the last rank in even ones."""
    model = seeded(small_net)
    engine = shard(model, native=native)
    optimizer = make_optimizer("sgd", model.parameters())
    seconds = 0.0

    def delay(place: str) -> Callable[..., None]:
        return lambda *args: time.sleep(seconds if where == place else 0.0)

    for block in model.blocks:
        block.linear.register_forward_pre_hook(delay("in forward"))
        block.register_forward_pre_hook(delay("before a gather"), prepend=True)
        block.register_forward_hook(
            lambda module, args, output: _SlowBackward.apply(output, seconds if where == "in backward" else 0.0)
        )
    losses = []
    for step, batch in enumerate(rank_batches(engine, batches(4))):
        seconds = 0.02 if dist.get_rank() == (0 if step % 2 else dist.get_world_size() - 1) else 0.0
        loss = loss_of(model, batch)
        delay("before backward")()
        loss.backward()
        delay("before the optimizer")()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return snapshot(model, losses)


@pytest.mark.parametrize("native", [False, True])
@two_and_three_ranks
def test_a_slow_rank_changes_no_bit(ranks: RankPool, world_size: int, native: bool) -> None:
    expected = ranks.run(_train_delayed, world_size, "nowhere", native)
    for where in ("in forward", "before a gather", "in backward", "before backward", "before the optimizer"):
        for one, other in zip(ranks.run(_train_delayed, world_size, where, native), expected, strict=True):
            assert_equal(one.params, other.params)
            assert one.losses == other.losses, where


# -- frozen parameters ------------------------------------------------------------------------------------------------


def _count_sent() -> tuple[list[tuple[str, int]], int]:
    """What each reduction of a step sends, and how many trainable elements every block has."""
    model = seeded(_half_frozen)
    model.blocks[1].requires_grad_(False)
    engine = shard(model)
    (batch,) = rank_batches(engine, batches(1))
    with engine.record() as recorder:
        loss_of(model, batch).backward()
    sent = [(event.unit, event.sent_numel) for event in recorder.of_kind("reduce_scatter") if event.unit]
    return sent, sum(p.numel() for p in model.blocks[0].parameters() if p.requires_grad)


@two_and_three_ranks
def test_only_trainable_parameters_are_reduced(ranks: RankPool, world_size: int) -> None:
    answers = ranks.run(_count_sent, world_size)
    num_trainable = answers[0][1]
    totals: dict[str, int] = {}
    for sent, _ in answers:
        for unit, numel in sent:
            totals[unit] = totals.get(unit, 0) + numel
    assert {unit: numel for unit, numel in totals.items() if numel} == dict.fromkeys(
        ["blocks.0", "blocks.2"], (world_size - 1) * num_trainable
    )


def _sum_after_thaw(native: bool) -> float:
    """A bf16 weight that is frozen in the first forward; its gradient is 1 on rank 0 and 2^-9 on the others."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).to(torch.bfloat16)
    nn.init.ones_(model[1].weight)
    model.requires_grad_(False)
    config = EngineConfig(layout=layouts.current())
    engine = FullyShardedEngine(model, ShardMesh(CPU, native=native), config)
    x = torch.tensor([[1.0 if dist.get_rank() == 0 else 2.0**-9]], dtype=torch.bfloat16)
    model(x)
    next(engine.params).sharded.requires_grad_(True)
    model(x).sum().backward()
    grad = next(engine.params).sharded.grad
    assert grad is not None
    return grad.full_tensor().item()


@pytest.mark.parametrize("native", [False, True])
def test_what_was_frozen_in_the_first_forward_is_summed_in_float32_too(ranks: RankPool, native: bool) -> None:
    # In bf16 1 + 2^-9 is 1; (1 + 3 * 2^-9) / 4 rounds to the next value above 1 / 4.
    exact = torch.tensor((1 + 3 * 2.0**-9) / 4).bfloat16().item()
    assert exact > 0.25
    assert ranks.run(_sum_after_thaw, 4, native) == [exact] * 4


# -- recomputation in mixed precision ---------------------------------------------------------------------------------


class Recomputing(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 32), nn.Linear(32, 2)
        self.blocks = nn.ModuleList(SmallBlock(32) for _ in range(2))
        self.dtypes: set[torch.dtype] = set()
        self.losses: list[float] = []

    def _call(self, block: nn.Module, x: Tensor) -> Tensor:
        output = block(x)
        self.dtypes.add(block.linear.weight.dtype if type(block.linear.weight) is nn.Parameter else output.dtype)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = checkpoint(self._call, block, x, use_reentrant=False)
        loss = (self.head(x) - batch[1]).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _fit_recomputing(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Recomputing()
    trainer = make_trainer(strategy, precision="bf16-mixed")
    trainer.fit(model, dealt_loader(24, 2))
    return model.losses, weights(trainer)


def test_recomputation_in_mixed_precision_gives_the_bits_of_ddp(ranks: RankPool) -> None:
    ours, ddp = ranks.run(_fit_recomputing, 2, "ours"), ranks.run(_fit_recomputing, 2, "ddp")
    assert [losses for losses, _ in ours] == [losses for losses, _ in ddp]
    assert_equal(dict(ours[0][1]), dict(ddp[0][1]))
