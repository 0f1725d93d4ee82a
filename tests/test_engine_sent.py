"""How many elements and messages a step sends: by the formula, by the recorder, and as seen from outside."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from fsdp_strategy.engine import FullyShardedEngine, collectives
from fsdp_strategy.engine.optimizer import LocalStep
from tests import layouts
from tests.engine_cases import (
    BUILDS,
    Net,
    batches,
    loss_of,
    make_optimizer,
    rank_batches,
    seeded,
    shard,
)
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts


def _sent_elements(build: str) -> tuple[int, int, int, int]:
    """Elements that this rank sends in a scheduled step; all of the model; as gathered, and of the root unit so.

    In the flat layout the gaps that alignment leaves are gathered too.
    """
    model = seeded(BUILDS[build])
    num_params = sum(param.numel() for param in model.parameters())
    engine = shard(model)
    gathered = {
        unit.fqn: sum(s.layout.unsharded_numel for s in unit.spans) if layouts.current() == "flat" else unit.numel
        for unit in engine.units
    }
    for batch in rank_batches(engine, batches(2)):
        with engine.record() as recorder:
            loss_of(model, batch).backward()
    sent = recorder.sent_numel("all_gather") + recorder.sent_numel("reduce_scatter")
    return sent, num_params, sum(gathered.values()), gathered.get("", 0)


@pytest.mark.parametrize("build", ["net", "chain"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_send_every_element_three_times_to_every_other_rank_and_the_root_unit_twice(
    ranks: RankPool, world_size: int, build: str
) -> None:
    results = ranks.run(_sent_elements, world_size, build)
    _, num_params, gathered, root_gathered = results[0]
    sent = sum(sent for sent, *_ in results)
    assert sent == (world_size - 1) * (num_params + 2 * gathered - root_gathered)


def _count_native_from_outside() -> tuple[Counter[str], dict[str, int]]:
    """A scheduled step as the backend's collectives see it, and as the recorder does."""
    model = seeded(Net)
    engine = shard(model, native=True)
    first, second = rank_batches(engine, batches(2))
    loss_of(model, first).backward()
    counts: Counter[str] = Counter()

    def counting(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(output: Tensor, source: Tensor, **kwargs: Any) -> Any:
            counts[kind] += 1
            counts[f"{kind} numel"] += (engine.shard_world_size - 1) * min(output.numel(), source.numel())
            return call(output, source, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch, engine.record() as recorder:
        for kind in ("all_gather", "reduce_scatter"):
            patch.setattr(collectives, f"_{kind}", counting(kind, getattr(collectives, f"_{kind}")))
        loss_of(model, second).backward()
    told = {}
    for kind in ("all_gather", "reduce_scatter"):
        told[kind] = sum(event.num_messages for event in recorder.of_kind(kind))
        told[f"{kind} numel"] = recorder.sent_numel(kind)
    return counts, told


def test_the_recorder_tells_what_native_collectives_send_with_their_padding(ranks: RankPool) -> None:
    results = ranks.run(_count_native_from_outside, 3)
    num_params = sum(param.numel() for param in Net().parameters())
    for counts, told in results:
        assert dict(counts) == told
        assert told == results[0][1], "pieces are equal on all ranks"
        assert 3 * told["reduce_scatter numel"] > 2 * num_params


class _Waited:
    """A started message that counts whether it has been waited for."""

    def __init__(self, work: Any, counts: Counter[str], name: str) -> None:
        self._work, self._counts, self._name = work, counts, name

    def wait(self) -> Any:
        self._counts[f"{self._name} waited"] += 1
        return self._work.wait()


@contextmanager
def _counted_sends(engine: FullyShardedEngine) -> Iterator[Counter[str]]:
    """Count calls, elements and bytes of sends and receives outside of the engine, apart for the control group."""
    counts: Counter[str] = Counter()
    control = engine.mesh.collectives.control_group
    originals = {name: getattr(dist, name) for name in ("isend", "irecv")}

    def counting(name: str) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            which = f"control {name}" if kwargs["group"] is control else name
            counts[which] += 1
            counts[f"{which} numel"] += tensor.numel()
            counts[f"{which} nbytes"] += tensor.nbytes
            return _Waited(originals[name](tensor, *args, **kwargs), counts, which)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _count_from_outside() -> tuple[Counter[str], Counter[str], dict[str, int]]:
    """A scheduled step and its optimizer step as `torch.distributed` sees them, and as the recorder does."""
    model = seeded(Net)
    engine = shard(model)
    optimizer = make_optimizer("adamw", model.parameters())
    LocalStep(optimizer, engine.params)
    first, second = rank_batches(engine, batches(2))
    loss_of(model, first).backward()
    optimizer.step()
    optimizer.zero_grad()
    with engine.record() as recorder:
        with _counted_sends(engine) as counts:
            loss_of(model, second).backward()
        with _counted_sends(engine) as step_counts:
            optimizer.step()
    messages = recorder.of_kind("all_gather", "reduce_scatter")
    told = {
        "isend": sum(event.num_messages for event in messages),
        "isend numel": sum(event.sent_numel for event in messages),
        "isend nbytes": sum(event.sent_nbytes for event in messages),
        "agree": recorder.count("agree"),
    }
    return counts, step_counts, told


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_recorder_tells_what_torch_distributed_sees(ranks: RankPool, world_size: int) -> None:
    results = ranks.run(_count_from_outside, world_size)
    for counts, step_counts, told in results:
        assert counts["isend"] > 0
        assert {name: counts[name] for name in ("isend", "isend numel", "isend nbytes")} == {
            name: told[name] for name in ("isend", "isend numel", "isend nbytes")
        }
        rounds = (world_size - 1).bit_length()
        assert counts["control isend"] == counts["control irecv"] == rounds * told["agree"]
        assert not step_counts, "an optimizer step sends nothing"
        for name in ("isend", "irecv"):
            assert counts[f"{name} waited"] == counts[name], "shards may be changed when backward has returned"
    sent, received = (sum(counts[f"{name} nbytes"] for counts, _, _ in results) for name in ("isend", "irecv"))
    assert sent == received
