"""What tests of the engine share: an odd model, data, a training loop, and how shards are put together again.

The functions that need ranks say so; the others also run in the pytest process, as the reference.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_strategy.engine import EngineConfig, FullyShardedEngine, Recorder, ShardMesh
from fsdp_strategy.engine.sharded_tensor import local_of
from tests import layouts

NUM_BLOCKS, WIDTH, HIDDEN, TOKENS = 3, 12, 1400, 3
BATCH_ROWS = 12  # divides among 1, 2, 3 and 4 ranks
CPU = torch.device("cpu")

Batch = tuple[Tensor, Tensor]


class OddBlock(nn.Module):
    """Attention and MLP. `up` and `down` travel alone (over 64 KiB); `mix` and `gain` leave trailing shards empty."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.mix = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h)[0]
        return x + self.gain * self.down(torch.tanh(self.up(x))) + self.mix


class SmallBlock(nn.Module):
    """The least that is a block, for tests of order rather than of shapes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """A stem and a head, which are the root unit, around blocks."""

    def __init__(self, block: Callable[[], nn.Module] = OddBlock, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def small_net() -> Net:
    return Net(SmallBlock)


def chain() -> nn.Module:
    """No root unit."""
    return nn.Sequential(*(SmallBlock(5) for _ in range(NUM_BLOCKS)))


BUILDS: dict[str, Callable[[], nn.Module]] = {"net": Net, "small net": small_net, "chain": chain}


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A model that is the same on every rank that asks with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def batches(num: int, dtype: torch.dtype = torch.float32, *, first: int = 0) -> list[Batch]:
    """Joined batches, numbered; what a rank works on is `rows_of` it."""
    drawn = []
    for index in range(first, first + num):
        generator = torch.Generator().manual_seed(1000 + index)
        x = torch.randn(BATCH_ROWS, TOKENS, 5, generator=generator, dtype=dtype)
        drawn.append((x, torch.randn(BATCH_ROWS, TOKENS, 1, generator=generator, dtype=dtype)))
    return drawn


def rows_of(batch: Batch, rank: int, world_size: int) -> Batch:
    """The rank's part of a joined batch."""
    x, y = batch
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def make_optimizer(name: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.005, momentum=0.9, fused=False)
    # The key bias of attention has a gradient of zero but for rounding, and Adam divides gradients by their size:
    # an eps above the rounding keeps the noise from becoming full steps.
    return torch.optim.AdamW(params, lr=0.001, eps=1e-4, fused=False)


@dataclass
class Trained:
    """What a training leaves: the losses, and values by fqn (a rank's shards, or whole parameters)."""

    losses: list[float]
    params: dict[str, Tensor]
    grads: dict[str, Tensor | None] = field(default_factory=dict)


def local(value: Tensor) -> Tensor:
    """This rank's shard, on memory of its own."""
    return local_of(value).detach().clone()


def snapshot(model: nn.Module, losses: Sequence[float] = ()) -> Trained:
    """Parameters and gradients as they are now; on a rank its shards."""
    named = dict(model.named_parameters())
    grads = {fqn: None if p.grad is None else local(p.grad) for fqn, p in named.items()}
    return Trained(list(losses), {fqn: local(p) for fqn, p in named.items()}, grads)


def train(model: nn.Module, data: Iterable[Batch], optimizer: str = "sgd") -> Trained:
    """One step per batch."""
    stepper = make_optimizer(optimizer, model.parameters())
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return snapshot(model, losses)


def average_grads(model: nn.Module, run: Callable[[int], None], world_size: int) -> None:
    """Leave in `.grad` the average of what `run(rank)` leaves there for every rank; None only where all have None."""
    params = list(model.parameters())
    sums: list[Tensor | None] = [None] * len(params)
    for rank in range(world_size):
        model.zero_grad()
        run(rank)
        for i, param in enumerate(params):
            if param.grad is not None:
                sums[i] = param.grad.clone() if sums[i] is None else sums[i] + param.grad
    for param, total in zip(params, sums, strict=True):
        param.grad = None if total is None else total / world_size


def unsharded_nbytes(engine: FullyShardedEngine) -> int:
    """What the engine holds besides shards; 0 between steps."""
    live = engine.live_nbytes
    return sum(live[category] for category in ("unsharded_param", "unsharded_grad", "gather_buffer", "reduce_buffer"))


def most_unsharded_blocks(recorder: Recorder) -> int:
    """Units but the root unit that are gathering or unsharded at one time."""
    held: set[str] = set()
    most = 0
    for event in recorder.of_kind("all_gather", "reshard"):
        if event.kind == "all_gather":
            held |= {event.unit} - {""}
        else:
            held -= {event.unit}
        most = max(most, len(held))
    assert not held
    return most


def shard(model: nn.Module, *, native: bool | None = None, **config: Any) -> FullyShardedEngine:
    """An engine over all ranks (needs ranks)."""
    return FullyShardedEngine(
        model, ShardMesh(CPU, native=native), EngineConfig(**{"layout": layouts.current(), **config})
    )


@contextmanager
def fake_group(world_size: int, rank: int) -> Iterator[None]:
    """This process as one rank of many that are not there: collectives return at once, with no values from others."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_batches(engine: FullyShardedEngine, data: Iterable[Batch]) -> list[Batch]:
    """This rank's part of every joined batch (needs ranks)."""
    return [rows_of(batch, engine.mesh.shard_rank, engine.shard_world_size) for batch in data]


def join(shards: Sequence[Tensor], like: Tensor) -> Tensor:
    """The whole tensor from all ranks' shards, which must be cut as the layout says."""
    if layouts.current() == "flat":
        assert all(piece.dim() == 1 for piece in shards)
        return torch.cat(list(shards)).as_strided(like.shape, like.stride())
    if not like.dim():
        assert all(torch.equal(piece, shards[0]) for piece in shards)
        return shards[0]
    cut = [tuple(chunk.shape) for chunk in like.chunk(len(shards))]
    cut += [(0, *like.shape[1:])] * (len(shards) - len(cut))
    assert [tuple(piece.shape) for piece in shards] == cut
    return torch.cat(list(shards))


def join_params(results: Sequence[Trained], reference: Trained) -> dict[str, Tensor]:
    """Whole parameters from every rank's shards."""
    assert all(result.params.keys() == reference.params.keys() for result in results)
    return {fqn: join([result.params[fqn] for result in results], like) for fqn, like in reference.params.items()}


def join_grads(results: Sequence[Trained], reference: Trained) -> dict[str, Tensor | None]:
    """Whole gradients; None where every rank has None."""
    joined: dict[str, Tensor | None] = {}
    for fqn, like in reference.params.items():
        pieces = [result.grads[fqn] for result in results]
        missing = [piece is None for piece in pieces]
        assert all(missing) or not any(missing), f"{fqn}: some ranks have a gradient and some have none"
        joined[fqn] = None if all(missing) else join([p for p in pieces if p is not None], like)
    return joined


def assert_equal(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    differing = [fqn for fqn, value in actual.items() if not _same(value, expected[fqn])]
    assert not differing


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def assert_close(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], tolerance: float) -> None:
    """Largest difference against the largest value of each tensor, but at least against 1."""
    assert actual.keys() == expected.keys()
    for fqn, value in actual.items():
        other = expected[fqn]
        assert (value is None) == (other is None), f"{fqn}: {value} against {other}"
        if value is None or other is None or not value.numel():
            continue
        scale = max(1.0, float(other.abs().max()))
        difference = float((value - other).abs().max())
        assert difference <= tolerance * scale, f"{fqn}: {difference} apart"
