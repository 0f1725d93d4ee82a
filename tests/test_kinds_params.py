"""Every kind of parameter trains as in plain replicas whose gradients are averaged; see `tests.kinds`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.engine_cases import TOKENS, WIDTH, Batch, Net, SmallBlock, loss_of, small_net
from tests.kinds import Kind, assert_trains_as_twin
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts


# -- parameters of unusual shapes and dtypes, one block's worth -------------------------------------------------------

Use = Callable[[Any, Tensor], Tensor]


class Extra(SmallBlock):
    """A block with more parameters, modules or buffers, used as `use` says."""

    def __init__(self, extra: Callable[[], dict[str, Any]], use: Use) -> None:
        super().__init__()
        for name, value in extra().items():
            if isinstance(value, (nn.Parameter, nn.Module)):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, super().forward(x))


def _param(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype) / 4)


def _conv(block: Any, y: Tensor) -> Tensor:
    image = y.transpose(1, 2).unsqueeze(-1).contiguous(memory_format=torch.channels_last)  # (rows, WIDTH, TOKENS, 1)
    return torch.tanh(block.conv(image)).squeeze(-1).transpose(1, 2)


def _many(block: Any, y: Tensor) -> Tensor:
    return y * (1 + 0.01 * sum(p.sin().sum() for name, p in block.named_parameters() if name.startswith("p")))


def _counted(block: Any, y: Tensor) -> Tensor:
    block.calls += 1
    block.seen |= y.detach().amax((0, 1)) > 1
    return torch.where(block.mask, y, 0.5 * y) + 0.01 * block.table[block.calls % 3]


EXTRAS: dict[str, tuple[Callable[[], dict[str, Any]], Use]] = {
    "0-d": (lambda: {"scale": _param()}, lambda block, y: y * (1 + block.scale)),
    "empty": (lambda: {"nothing": _param(0, 4)}, lambda block, y: y + block.nothing.sum()),
    "one row": (lambda: {"row": _param(1, 700)}, lambda block, y: y + block.row.sin().sum()),
    "two rows, large": (lambda: {"rows": _param(2, 9000)}, lambda block, y: y * (1 + 0.01 * block.rows.sin().sum())),
    "transposed": (
        lambda: {"matrix": nn.Parameter((torch.randn(7, WIDTH) / 4).t())},
        lambda block, y: y + y @ block.matrix @ block.matrix.t(),
    ),
    "channels last": (
        lambda: {"conv": nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0)).to(memory_format=torch.channels_last)},
        _conv,
    ),
    "complex": (
        lambda: {"filter": _param(7, dtype=torch.complex64)},
        lambda block, y: y + torch.fft.irfft(torch.fft.rfft(y) * block.filter, n=WIDTH),
    ),
    "complex128 beside float32": (
        lambda: {"phase": _param(3, 5, dtype=torch.complex128)},
        lambda block, y: y * (1 + block.phase.abs().sum().float() / 9),
    ),
    "float64 beside float32": (
        lambda: {"wide": _param(WIDTH, dtype=torch.float64), "last": _param(5, dtype=torch.float64)},
        lambda block, y: (y * block.wide).float() + block.last.sum().float(),
    ),
    # 96 rows: torch's bf16 addition rounds otherwise in the rest after whole vectors, and here no rank has a rest.
    "bfloat16 beside float32": (
        lambda: {"narrow": _param(96, WIDTH, dtype=torch.bfloat16)},
        lambda block, y: y + (y.bfloat16() @ block.narrow.t() @ block.narrow).float() / 9,
    ),
    "integers": (
        lambda: {"order": nn.Parameter(torch.randperm(WIDTH), requires_grad=False)},
        lambda block, y: y[..., block.order] * y,
    ),
    "very many small": (lambda: {f"p{i}": _param(1 + i % 3) for i in range(60)}, _many),
    "integer and boolean buffers": (
        lambda: {
            "calls": torch.tensor(0),
            "mask": torch.arange(WIDTH) % 3 > 0,
            "seen": torch.zeros(WIDTH, dtype=torch.bool),
            "table": torch.arange(3, dtype=torch.int16),
        },
        _counted,
    ),
    "batch norm": (
        lambda: {"bn": nn.BatchNorm1d(WIDTH, momentum=0.3)},
        lambda block, y: block.bn(y.transpose(1, 2)).transpose(1, 2),
    ),
}


# -- frozen ones ------------------------------------------------------------------------------------------------------


def _half_frozen() -> Net:
    net = small_net()
    for index, param in enumerate(net.parameters()):
        param.requires_grad_(index % 2 == 0)
    return net


def _freeze_by_turns(model: Net, step: int) -> None:
    model.blocks[step % 3].linear.weight.requires_grad_(False)
    model.blocks[(step + 1) % 3].requires_grad_(True)
    model.stem.bias.requires_grad_(step % 2 == 0)


class LowRank(nn.Module):
    """An adapter beside a frozen weight; the merged form reads the weight without calling its module."""

    def __init__(self, is_merged: bool) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.down, self.up = _param(2, WIDTH), _param(WIDTH, 2)
        self.is_merged = is_merged

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.is_merged:
            return x + torch.tanh(F.linear(h, self.base.weight + self.up @ self.down, self.base.bias))
        return x + torch.tanh(self.base(h) + h @ self.down.t() @ self.up.t())


def _adapters(is_merged: bool) -> Net:
    net = Net(lambda: LowRank(is_merged))
    net.stem.requires_grad_(False)
    return net


# -- tied ones --------------------------------------------------------------------------------------------------------


class TiedInside(SmallBlock):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(super().forward(x))


def _tied_across_blocks() -> Net:
    net = small_net()
    net.blocks[2].linear.weight = net.blocks[0].linear.weight
    net.blocks[1].norm.bias = net.blocks[2].norm.bias
    return net


class Language(nn.Module):
    """An embedding, whose number of rows no number of ranks divides, and a head of the same weight."""

    def __init__(self, num_rows: int = 7, *, is_tied: bool = True, **embedding: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_rows, WIDTH, **embedding)
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, num_rows if is_tied else 5, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def language_loss(model: Language, batch: Batch, step: int) -> Tensor:
    tokens = (batch[0].abs().sum(-1) * 3).long() % model.embedding.num_embeddings
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 5)


# -- parameters outside their module's forward ------------------------------------------------------------------------


class WithOwn(Net):
    """Parameters of the outermost module, one used in its forward, one by the training step."""

    def __init__(self) -> None:
        super().__init__(SmallBlock)
        self.shift, self.scale, self.prompt = _param(WIDTH), _param(1), _param(TOKENS, 5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.prompt)


def _scaled_loss(model: WithOwn, batch: Batch, step: int) -> Tensor:
    return (model(batch[0]) * model.scale - batch[1]).square().mean() + model.shift.cos().sum()


class Holder(nn.Linear):
    """Nobody calls it."""


class Borrowing(Net):
    """Reads weights of modules that it does not call, before, between and after the calls of their units."""

    def __init__(self) -> None:
        super().__init__(SmallBlock)
        self.holder = Holder(WIDTH, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x @ self.holder.weight, self.blocks[2].linear.weight)
        for block in self.blocks:
            x = block(x) + 0.1 * F.linear(x, self.blocks[0].linear.weight)
        x = F.linear(x, self.blocks[1].linear.weight, self.blocks[1].linear.bias)
        return self.head(x) + F.linear(x, self.head.weight)


def _penalised_loss(model: Net, batch: Batch, step: int) -> Tensor:
    first, last = model.blocks[0].linear.weight, model.blocks[2].linear.weight
    gram = first @ first.t() - torch.eye(WIDTH)
    similarity = F.cosine_similarity(first.flatten(), last.flatten(), dim=0)
    norms = torch.stack([p.norm() for p in model.parameters()])
    return loss_of(model, batch) + 0.01 * (gram.square().sum() + similarity + norms.sum())


def _loss_with_norms(model: Net, batch: Batch, step: int) -> Tensor:
    """What is logged must be right, too: it goes into the loss without a gradient."""
    norms = torch.stack([p.detach().norm() for p in model.parameters()])
    with torch.no_grad():
        largest = max(p.abs().max() for p in model.blocks[step % 3].parameters())
    return loss_of(model, batch) * (1 + norms.sum() / 100 + largest)


def _loss_after_clipping(model: Net, batch: Batch, step: int) -> Tensor:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.2, 0.2)
        model.head.weight.div_(model.head.weight.norm())
        model.blocks[1].linear.weight.data.mul_(1.1)
    return loss_of(model, batch)


@torch.no_grad()
def _renormalise(model: Net, step: int) -> None:
    for block in model.blocks:
        block.linear.weight.div_(block.linear.weight.norm(dim=1, keepdim=True))
        block.norm.weight.data.clamp_(0.9, 1.05)
    model.head.weight.copy_(F.normalize(model.head.weight, dim=1))


def _load_then_reset(model: Net, step: int) -> None:
    if step == 0:
        other = {fqn: torch.full(tensor.shape, 0.1) for fqn, tensor in model.state_dict().items()}
        model.load_state_dict(other)
    if step == 1:
        torch.manual_seed(3)
        model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    if step == 2:
        model.blocks[1].load_state_dict({k: 2 * torch.ones(v.shape) for k, v in model.blocks[1].state_dict().items()})
        nn.init.constant_(model.head.bias, 0.5)


# -- computed weights -------------------------------------------------------------------------------------------------


class Squashed(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.gain


def _doubly(linear: nn.Linear) -> nn.Module:
    """Two, one after the other, of which one has parameters of its own."""
    parametrize.register_parametrization(linear, "weight", Squashed())
    return parametrize.register_parametrization(linear, "weight", Gained())


def _pruned(linear: nn.Linear) -> nn.Module:
    return prune.l1_unstructured(linear, "weight", amount=0.3)


def _computed(compute: Callable[[nn.Linear], nn.Module]) -> Callable[[], Net]:
    def build() -> Net:
        net = small_net()
        for linear in (*(block.linear for block in net.blocks), net.head, net.stem):
            compute(linear)
        return net

    return build


COMPUTED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_norm by hooks": nn.utils.spectral_norm,
    "orthogonal": lambda linear: parametrizations.orthogonal(linear, use_trivialization=True),
    "parametrizations of the user's": _doubly,
    "pruned": _pruned,
}


KINDS: dict[str, Kind] = {
    **{name: Kind(build=lambda e=extra, u=use: Net(lambda: Extra(e, u))) for name, (extra, use) in EXTRAS.items()},
    **{name: Kind(build=_computed(compute)) for name, compute in COMPUTED.items()},
    "frozen and trainable mixed": Kind(build=_half_frozen),
    "frozen and unfrozen by turns": Kind(between=_freeze_by_turns),
    "low-rank adapters": Kind(build=lambda: _adapters(False)),
    "merged low-rank adapters": Kind(build=lambda: _adapters(True)),
    "tied in a unit": Kind(build=lambda: Net(TiedInside)),
    "tied across units": Kind(build=_tied_across_blocks),
    "tied embedding and head": Kind(build=Language, loss=language_loss),
    "tied embedding and head, units of their own": Kind(
        build=Language, loss=language_loss, units=["SmallBlock", "embedding", "head"]
    ),
    "one huge embedding": Kind(
        build=lambda: Language(8191, is_tied=False, padding_idx=3),
        loss=language_loss,
        units=["SmallBlock", "Embedding"],
    ),
    "sparse gradients": Kind(build=lambda: Language(31, is_tied=False, sparse=True), loss=language_loss),
    "of the outermost module": Kind(build=WithOwn, loss=_scaled_loss),
    "borrowed by a parent": Kind(build=Borrowing),
    "borrowed by a parent, units of their own": Kind(build=Borrowing, units=["SmallBlock", "Holder", "Linear"]),
    "penalised in the training step": Kind(loss=_penalised_loss),
    "norms of weights in the training step": Kind(loss=_loss_with_norms),
    "clipped in the training step": Kind(loss=_loss_after_clipping),
    "renormalised between steps": Kind(between=_renormalise),
    "loaded and initialised again": Kind(between=_load_then_reset),
}


def _train(name: str) -> None:
    assert_trains_as_twin(KINDS[name])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_kind_of_parameter_trains_as_in_plain_replicas(ranks: RankPool, world_size: int, name: str) -> None:
    with ranks.timeout(20):
        ranks.run(_train, world_size, name)
