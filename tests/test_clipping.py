"""Clipping sees the gradients of all ranks as one vector, and each once."""

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from fsdp_strategy.engine import LocalStep
from fsdp_strategy.engine.gradnorm import clip_grad_norm, global_norm, local_grads
from tests.engine_cases import batches, loss_of, rows_of, seeded, shard, small_net
from tests.layouts import both_layouts
from tests.models import Tiny, dealt_loader
from tests.models import seeded as seeded_module
from tests.pooled_trainer import make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts

# The norm is a sum in another order, and other ranks sum the same gradients in another order: fp32 rounding.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class _Logged(Tiny):
    """Keeps Lightning's own gradient norm of every step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms = [*getattr(self, "norms", []), float(grad_norm(self, 2)["grad_2.0_norm_total"])]


def _fit(strategy: str, world_size: int, **trainer_args: Any) -> tuple[dict[str, Tensor], list[float]]:
    module = seeded_module(_Logged)
    trainer = make_trainer(strategy, **trainer_args)
    trainer.fit(module, dealt_loader(48, 12 // world_size))
    return (weights(trainer) if strategy == "ours" else module.state_dict()), module.norms


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_clipped_training_equals_one_process(ranks: RankPool, world_size: int, algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    ours, norms = ranks.run(_fit, world_size, "ours", world_size, **clip)[0]
    single, single_norms = ranks.run(_fit, 1, "single", 1, **clip)[0]
    unclipped, _ = ranks.run(_fit, 1, "single", 1)[0]
    for fqn, tensor in single.items():
        torch.testing.assert_close(ours[fqn], tensor, **TOLERANCE)
    assert not all(torch.allclose(unclipped[fqn], tensor, **TOLERANCE) for fqn, tensor in single.items())
    assert norms == pytest.approx(single_norms, rel=1e-4)


class _Manual(_Logged):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


def _fit_manually(strategy: str, world_size: int) -> dict[str, Tensor]:
    module = seeded_module(_Manual)
    trainer = make_trainer(strategy)
    trainer.fit(module, dealt_loader(48, 12 // world_size))
    return weights(trainer) if strategy == "ours" else module.state_dict()


def test_clipping_in_manual_optimization_equals_one_process(ranks: RankPool) -> None:
    ours, single = ranks.run(_fit_manually, 3, "ours", 3)[0], ranks.run(_fit_manually, 1, "single", 1)[0]
    for fqn, tensor in single.items():
        torch.testing.assert_close(ours[fqn], tensor, **TOLERANCE)


def _norms(norm_type: float) -> tuple[float, float, float]:
    """The global norm, its twin of torch on the whole gradients, and the norm after clipping to a half."""
    model, plain = seeded(small_net), seeded(small_net)
    engine = shard(model)
    LocalStep(torch.optim.SGD(model.parameters(), lr=0.1), engine.params)
    (batch,) = batches(1)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    loss_of(model, rows_of(batch, rank, world_size)).backward()
    loss_of(plain, batch).backward()
    params, collectives = list(model.parameters()), engine.mesh.collectives
    norm = clip_grad_norm(params, 0.5, collectives, norm_type).item()
    whole = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None], norm_type).item()
    return norm, whole, global_norm(local_grads(params, own_only=True), collectives, norm_type).item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_global_norm_is_that_of_the_whole_gradients(ranks: RankPool, norm_type: float) -> None:
    for norm, whole, clipped in ranks.run(_norms, 3, norm_type):
        assert norm == pytest.approx(whole, rel=1e-4)
        assert clipped == pytest.approx(min(0.5, whole), rel=1e-4)
