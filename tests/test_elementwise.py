"""Optimizers that look at more than single elements are refused; what cannot be probed is let through, warned of."""

import copy
import inspect
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_strategy.engine.elementwise import check_elementwise
from tests.models import Tiny, loader
from tests.pooled_trainer import make_trainer
from tests.rank_pool import RankPool

ELEMENTWISE = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]


class NormalisedByRow(Optimizer):
    """A user's own: every row moves by a unit step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])
        return loss


class Demanding(torch.optim.SGD):
    """Needs more than its settings."""

    def __init__(self, params: Any, oracle: object) -> None:
        super().__init__(params, lr=0.1)


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2))]


@pytest.mark.parametrize(("cls", "settings"), ELEMENTWISE)
def test_elementwise_optimizers_are_let_through(cls: type[Optimizer], settings: dict[str, Any]) -> None:
    optimizer = cls(_params(), **settings)
    before = copy.deepcopy(optimizer.state_dict())
    check_elementwise(optimizer)
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.LBFGS, NormalisedByRow])
def test_others_are_refused_by_name(cls: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=f"got {cls.__name__}, whose result over shards differs"):
        check_elementwise(cls(_params()))


def test_an_optimizer_that_cannot_be_probed_is_let_through_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_elementwise(Demanding(_params(), object()))
    assert "Demanding could not be probed" in caplog.text


def test_probing_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check_elementwise(torch.optim.SGD(_params(), lr=0.1))
    assert torch.equal(torch.rand(1), expected)


class _Factored(Tiny):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adafactor(self.parameters())


def _fit_factored() -> str:
    with pytest.raises(ValueError, match="Adafactor") as error:
        make_trainer("ours").fit(_Factored(), loader(8, 2))
    return str(error.value)


def test_a_fit_with_adafactor_is_refused_on_every_rank(ranks: RankPool) -> None:
    for message in ranks.run(_fit_factored, 2):
        assert "strategy='ddp'" in message


def test_every_optimizer_of_torch_is_covered() -> None:
    """A new one in torch must be put on one of the lists."""
    known = {cls.__name__ for cls, _ in ELEMENTWISE} | {"Adafactor", "LBFGS", "SparseAdam", "Muon", "Optimizer"}
    found = {name for name, cls in vars(torch.optim).items() if inspect.isclass(cls) and issubclass(cls, Optimizer)}
    assert found <= known
