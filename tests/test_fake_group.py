"""One rank of many, without the others: layouts and counts at world sizes that no test machine has."""

import pytest
import torch

from fsdp_strategy.engine import ShardMesh
from fsdp_strategy.engine.collectives import NativeCollectives
from tests.engine_cases import (
    CPU,
    NUM_BLOCKS,
    Net,
    batches,
    fake_group,
    loss_of,
    make_optimizer,
    seeded,
    shard,
    unsharded_nbytes,
)
from tests.rank_pool import RankPool

every_rank = pytest.mark.parametrize(("world_size", "rank"), [(8, 0), (8, 7), (64, 0), (64, 63)])


def _shapes(world_size: int, rank: int) -> dict[str, tuple[int, ...]]:
    with fake_group(world_size, rank):
        model = seeded(Net)
        shard(model)
        return {fqn: tuple(param.to_local().shape) for fqn, param in model.named_parameters()}


@every_rank
def test_a_rank_of_many_has_the_rows_that_torch_chunk_gives_it(ranks: RankPool, world_size: int, rank: int) -> None:
    (shapes,) = ranks.run(_shapes, 1, world_size, rank)
    for fqn, param in Net().named_parameters():
        chunks = [tuple(chunk.shape) for chunk in param.chunk(world_size)]
        expected = chunks[rank] if rank < len(chunks) else (0, *param.shape[1:])
        assert shapes[fqn] == expected, fqn


def _train(world_size: int, rank: int) -> list[tuple[int, int, int, int]]:
    """Per step: gathers, reductions, elements sent by this rank, bytes left unsharded."""
    with fake_group(world_size, rank):
        model = seeded(Net)
        engine = shard(model)
        optimizer = make_optimizer("adamw", model.parameters())
        steps = []
        for batch in batches(3):
            with engine.record() as recorder:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            sent = recorder.sent_numel("all_gather") + recorder.sent_numel("reduce_scatter")
            counts = recorder.counts()
            steps.append((counts["all_gather"], counts["reduce_scatter"], sent, unsharded_nbytes(engine)))
        return steps


@every_rank
def test_a_rank_of_many_runs_training_steps_with_the_counts_of_any_world_size(
    ranks: RankPool, world_size: int, rank: int
) -> None:
    (steps,) = ranks.run(_train, 1, world_size, rank)
    num_gathered, num_reduced, sent, nbytes_left = steps[0]
    assert (num_gathered, num_reduced, nbytes_left) == (2 * NUM_BLOCKS + 1, NUM_BLOCKS + 1, 0)
    assert steps == steps[:1] * 3
    num_params = sum(param.numel() for param in Net().parameters())
    num_root = sum(param.numel() for name, param in Net().named_parameters() if "blocks" not in name)
    assert sent * world_size >= (world_size - 1) * (3 * num_params - num_root), "padding is sent too"


def _kind_of_collectives() -> bool:
    with fake_group(8, 3):
        mesh = ShardMesh(CPU)
        value = torch.tensor([5, 7], dtype=torch.int32)
        assert torch.equal(mesh.collectives.agree_max(value), value)
        assert (mesh.shard_world_size, mesh.shard_rank) == (8, 3)
        return isinstance(mesh.collectives, NativeCollectives)


def test_any_backend_but_gloo_uses_its_own_collectives(ranks: RankPool) -> None:
    assert ranks.run(_kind_of_collectives, 1) == [True]
