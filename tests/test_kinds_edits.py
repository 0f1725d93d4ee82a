"""What people do to parameters in a step: edit, freeze and zero them; training equals that of plain replicas."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine_cases import WIDTH, Batch, Net, SmallBlock, loss_of, shard
from tests.kinds import Kind, assert_trains_as_twin
from tests.layouts import both_layouts
from tests.rank_pool import RankPool
from tests.test_kinds_params import Language, language_loss

pytestmark = both_layouts


class SelfClipping(SmallBlock):
    """Changes its own weight in place before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Forced(nn.Linear):
    """Normalises its weight for good, as EDM2 does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
        return super().forward(x)


class SelfNormalising(SmallBlock):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Forced(WIDTH, WIDTH)


def _root_clipping() -> Net:
    net = Net(SmallBlock)
    net.stem, net.head = Forced(5, WIDTH), Forced(WIDTH, 1)
    return net


def _frozen_in_the_step(model: Net, batch: Batch, step: int) -> Tensor:
    """As GANs do by hand: freeze one part, unfreeze the other."""
    for module in (model.stem, model.blocks[0]):
        for param in module.parameters():
            param.requires_grad = step % 2 == 1
    return loss_of(model, batch)


def _zeroed_by_the_module(model: Net, batch: Batch, step: int) -> Tensor:
    """Manual optimization: two backwards, of which only the second one counts."""
    loss_of(model, (2 * batch[0], batch[1])).backward()
    loss = loss_of(model, batch)
    model.zero_grad()
    loss.backward()
    return loss


def _zeroed_before(model: Net, batch: Batch, step: int) -> Tensor:
    loss_of(model, (2 * batch[0], batch[1])).backward()
    model.stem(batch[0])
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return loss


KINDS: dict[str, Kind] = {
    "clipped in a forward": Kind(build=lambda: Net(SelfClipping)),
    "normalised in a forward": Kind(build=lambda: Net(SelfNormalising)),
    "normalised in a forward, root unit": Kind(build=_root_clipping),
    # Every rank sees all three rows: replicas would otherwise renormalise different ones.
    "max_norm": Kind(build=lambda: Language(3, is_tied=False, max_norm=0.5), loss=language_loss),
    "max_norm, a unit of its own": Kind(
        build=lambda: Language(3, is_tied=False, max_norm=0.5), loss=language_loss, units=["SmallBlock", "Embedding"]
    ),
    "frozen by hand": Kind(loss=_frozen_in_the_step),
    "zeroed by the module": Kind(step=_zeroed_by_the_module),
    "zeroed by the module after a call": Kind(step=_zeroed_before),
}


def _train(name: str) -> None:
    assert_trains_as_twin(KINDS[name])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_done_to_parameters_in_a_step_counts(ranks: RankPool, world_size: int, name: str) -> None:
    with ranks.timeout(20):
        ranks.run(_train, world_size, name)


class Halving(nn.Module):
    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_rows, 64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight.mean()


def _halve(num_rows: int) -> int:
    """How often a forward that edits its weight in place saw other than the whole, edited once."""
    model = nn.Sequential(Halving(num_rows), Halving(num_rows))
    shard(model)
    wrong = 0
    for _ in range(30):
        with torch.no_grad():
            wrong += float(model(torch.ones(()))) != 0.25
            for param in model.parameters():
                param.fill_(1.0)
    return wrong


@pytest.mark.parametrize("num_rows", [40, 4000])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_edit_inside_a_forward_is_not_seen_by_ranks_that_still_receive(
    ranks: RankPool, world_size: int, num_rows: int
) -> None:
    assert ranks.run(_halve, world_size, num_rows) == [0] * world_size
