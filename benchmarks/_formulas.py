"""What is expected of a step: pure arithmetic on the units of an engine."""

from fsdp_strategy.engine import FullyShardedEngine

_CACHE_LINE_NBYTES = 64


def most_working_nbytes(engine: FullyShardedEngine, prefetch_limit: int) -> tuple[int, int]:
    """The most that forward and backward may need above the state, in bytes, without activations.

    For units of U bytes as gathered and G as reduced, beside the root unit: forward (1 + prefetch_limit) U, backward
    (1 + prefetch_limit) U + 2 U of gradients + G of reduction buffers.
    """
    blocks = [unit for unit in engine.units if not unit.is_root]
    root_nbytes = engine.root_unit.unsharded_nbytes if engine.root_unit else 0
    unit_nbytes = max(unit.unsharded_nbytes for unit in blocks)
    # Every parameter is padded to whole cache lines for each rank, in the reduction buffer as well.
    padding = _CACHE_LINE_NBYTES * engine.shard_world_size * max(len(unit.params) for unit in blocks)
    reduce_nbytes = 4 * max(unit.numel for unit in blocks) + padding
    forward = root_nbytes + (1 + prefetch_limit) * unit_nbytes
    return forward, forward + 2 * unit_nbytes + root_nbytes + reduce_nbytes
