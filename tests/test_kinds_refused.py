"""What sharded parameters refuse, and what their norms and whole values must not do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.engine_cases import batches, loss_of, rank_batches, seeded, shard, small_net
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts


def _norm_of_a_gradient() -> tuple[float, float]:
    """The head's weight has one row, so all ranks but the first have no elements of its gradient."""
    model = seeded(small_net)
    engine = shard(model)
    loss_of(model, rank_batches(engine, batches(1))[0]).backward()
    grad = model.head.weight.grad
    return float(torch.linalg.vector_norm(grad, float("inf"))), float(grad.full_tensor().abs().max())


def test_the_largest_element_of_a_gradient_of_one_row(ranks: RankPool) -> None:
    """No rank may raise alone because it has no element."""
    with ranks.timeout(8):
        for norm, whole in ranks.run(_norm_of_a_gradient, 2):
            assert norm == whole


def _cast() -> str:
    model = seeded(small_net)
    shard(model)
    with pytest.raises(ValueError, match="Convert the module before") as error:
        model.to(torch.float64)
    return str(error.value)


def test_a_cast_after_setup_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(_cast, 2):
        assert "float64" in message


def _shard_twice() -> str:
    model = seeded(small_net)
    shard(model)
    with pytest.raises(ValueError, match="Expected") as error:
        shard(model)
    return str(error.value)


def test_sharding_twice_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(_shard_twice, 2):
        assert "already" in message
        assert "stem.weight" in message or "Net" in message


def _shard_a_dtensor() -> str:
    model = small_net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(model.blocks[0].linear.weight.detach(), mesh, [Replicate()])
    model.blocks[0].linear.weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match="Expected") as error:
        shard(model)
    return str(error.value)


def test_a_parameter_that_is_a_dtensor_already_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(_shard_a_dtensor, 2):
        assert "DTensor" in message
        assert "blocks.0.linear.weight" in message


def _kept_gradients() -> list[float]:
    model = nn.Sequential(nn.Linear(3, 3))
    model.scale = nn.Parameter(torch.tensor(2.0))
    engine = shard(model)
    kept = []
    for factor in (1.0, 5.0):
        model.zero_grad()
        with engine.iteration("training"):
            (model(torch.ones(2, 3)).mean() + model.scale * factor).backward()
        kept.append(model.scale.grad.full_tensor())
    return [float(grad) for grad in kept]


def test_a_whole_gradient_of_a_0d_parameter_is_not_overwritten(ranks: RankPool) -> None:
    assert ranks.run(_kept_gradients, 2) == [[1.0, 5.0]] * 2
