"""`unshard`: whole parameters to read, or to edit and shard again."""

import pytest
import torch
from torch import nn

from fsdp_strategy import unshard
from fsdp_strategy.engine import restore
from tests.engine_cases import seeded, shard, small_net
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts


def _read() -> bool:
    model, plain = seeded(small_net), seeded(small_net)
    engine = shard(model)
    with unshard(model):
        values = [p.detach().clone() for p in model.parameters()]
        assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(p is q.sharded for p, q in zip(model.parameters(), sorted_like(engine, model), strict=True))
    return all(torch.equal(a, b) for a, b in zip(values, plain.parameters(), strict=True))


def sorted_like(engine, model):  # type: ignore[no-untyped-def]
    """The engine's parameters in the module's order."""
    by_id = {id(param.sharded): param for param in engine.params}
    return [by_id[id(param)] for param in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unshard_shows_the_original_values_and_puts_the_shards_back(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_read, world_size) == [True] * world_size


def _edit() -> list[float]:
    model = seeded(small_net)
    shard(model)
    rank = torch.distributed.get_rank()
    with unshard(model, write=True), torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0 + rank)  # ranks disagree
    with unshard(model):
        return sorted({value for p in model.parameters() for value in p.flatten().tolist()})


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_edits_of_rank_0_are_kept_by_all(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_edit, world_size) == [[7.0]] * world_size


def _edit_without_write() -> bool:
    model = seeded(small_net)
    shard(model)
    with pytest.warns(UserWarning, match="dropped. Pass write=True"), unshard(model), torch.no_grad():
        next(model.parameters()).fill_(7.0)
    with unshard(model):
        return bool((next(model.parameters()) == 7.0).any())


def test_edits_without_write_are_dropped_with_a_warning(ranks: RankPool) -> None:
    assert ranks.run(_edit_without_write, 2) == [False, False]


def test_a_module_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a sharded module, got Linear"), unshard(nn.Linear(2, 2)):
        pass


def _restore() -> bool:
    model, plain = seeded(small_net), seeded(small_net)
    restore(shard(model))
    shard(model)  # nothing of the first engine is left in the way
    with unshard(model):
        return all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_restored_module_can_be_sharded_again(ranks: RankPool) -> None:
    assert ranks.run(_restore, 3) == [True] * 3
