"""Gradients on the wire: in 16 bits, summed in float32 where they arrive; long ones in several messages."""

import pytest
import torch
from torch import nn

from fsdp_strategy.engine import operations
from tests.engine_cases import (
    Net,
    Trained,
    assert_close,
    assert_equal,
    batches,
    join_grads,
    loss_of,
    rank_batches,
    seeded,
    shard,
    snapshot,
)
from tests.layouts import both_layouts
from tests.models import Tiny, dealt_loader
from tests.models import seeded as seeded_module
from tests.pooled_trainer import make_strategy, make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts


def _step(wire: str, native: bool | None = None) -> tuple[Trained, int, int]:
    """Gradients of one step in bf16, and the bytes and elements that this rank sends to reduce them."""
    model = seeded(Net)
    param_dtypes = {fqn: torch.bfloat16 for fqn, _ in model.named_parameters()}
    engine = shard(model, native=native, param_dtypes=param_dtypes, reduce_wire=wire)
    x, y = rank_batches(engine, batches(1))[0]
    with engine.record() as recorder:
        loss_of(model, (x.bfloat16(), y.bfloat16())).backward()
    return snapshot(model), recorder.sent_nbytes("reduce_scatter"), recorder.sent_numel("reduce_scatter")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_are_the_same_bits_with_half_the_bytes(ranks: RankPool, world_size: int) -> None:
    reference = snapshot(seeded(Net))
    wide, narrow = (ranks.run(_step, world_size, wire) for wire in ("reduce_dtype", "param_dtype"))
    assert_equal(join_grads([r for r, *_ in narrow], reference), join_grads([r for r, *_ in wide], reference))
    for (_, wide_nbytes, numel), (_, narrow_nbytes, same_numel) in zip(wide, narrow, strict=True):
        assert (wide_nbytes, narrow_nbytes, same_numel) == (4 * numel, 2 * numel, numel)


def test_the_backends_own_collectives_give_the_same_sums(ranks: RankPool) -> None:
    reference = snapshot(seeded(Net))
    ours, native = ranks.run(_step, 3, "param_dtype"), ranks.run(_step, 3, "param_dtype", True)
    assert_close(join_grads([r for r, *_ in native], reference), join_grads([r for r, *_ in ours], reference), 1e-6)


def _sum_of_large_and_small() -> list[float]:
    """A weight whose gradients on the ranks are 256, 1 and 1: in bf16 they add up to 256."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    engine = shard(model, units=["0"], param_dtypes={"0.weight": torch.bfloat16}, reduce_wire="param_dtype")
    x = torch.full((1, 1), 256.0 if engine.mesh.shard_rank == 0 else 1.0, dtype=torch.bfloat16)
    model(x).sum().backward()
    (param,) = model.parameters()
    assert param.grad is not None
    return param.grad.to_local().flatten().tolist()


def test_the_sum_has_the_digits_that_the_wire_has_not(ranks: RankPool) -> None:
    values = [value for own in ranks.run(_sum_of_large_and_small, 3) for value in own]
    assert values == [pytest.approx(258 / 3)]


def _in_short_messages(most_nbytes: int) -> tuple[Trained, int]:
    """Two steps with a limit on the length of messages, and the messages of the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "MAX_MESSAGE_NBYTES", most_nbytes)
        model = seeded(Net)
        engine = shard(model)
        for batch in rank_batches(engine, batches(2)):
            with engine.record() as recorder:
                loss_of(model, batch).backward()
    return snapshot(model), sum(event.num_messages for event in recorder.events)


@pytest.mark.parametrize("world_size", [2, 3])
def test_long_messages_travel_in_parts(ranks: RankPool, world_size: int) -> None:
    reference = snapshot(seeded(Net))
    whole, parts = (ranks.run(_in_short_messages, world_size, nbytes) for nbytes in (2**25, 5000))
    assert_equal(join_grads([r for r, _ in parts], reference), join_grads([r for r, _ in whole], reference))
    assert all(many > 2 * few for (_, few), (_, many) in zip(whole, parts, strict=True))


def _fit(wire: str) -> dict[str, torch.Tensor]:
    trainer = make_trainer(make_strategy(reduce_wire=wire), precision="bf16-mixed")
    trainer.fit(seeded_module(Tiny), dealt_loader(16, 2))
    return weights(trainer)


def test_training_in_bf16_mixed_gives_the_same_weights_on_either_wire(ranks: RankPool) -> None:
    assert_equal(ranks.run(_fit, 2, "param_dtype")[0], ranks.run(_fit, 2, "reduce_dtype")[0])
