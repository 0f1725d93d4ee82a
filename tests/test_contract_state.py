"""The FSDP2 contract on what a sharded module shows: shards, whole parameters in a forward, state dicts, norms."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_strategy import unshard
from tests import layouts
from tests.engine_cases import (
    NUM_BLOCKS,
    WIDTH,
    Net,
    SmallBlock,
    batches,
    chain,
    join,
    local,
    loss_of,
    make_optimizer,
    rank_batches,
    rows_of,
    seeded,
    shard,
    small_net,
)
from tests.layouts import both_layouts
from tests.rank_pool import RankPool

pytestmark = both_layouts

two_and_three_ranks = pytest.mark.parametrize("world_size", [2, 3])


class Shared(Net):
    """A module under two names, and parameters that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__(SmallBlock)
        self.twin = self.stem
        self.odd = nn.Parameter(torch.randn(7, 5))
        self.few = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.twin(x @ self.odd.t() @ self.odd).mean(-1, keepdim=True) * self.few.sum()


def _shards() -> tuple[dict[str, Tensor], list[str]]:
    """This rank's shards by name, and what is wrong with a parameter or its gradient."""
    model, plain = seeded(Shared), seeded(Shared)
    engine = shard(model)
    loss_of(model, rank_batches(engine, batches(1))[0]).backward()
    wrong = []
    for (fqn, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.grad is not None
        for what, tensor in (("parameter", param), ("gradient", param.grad)):
            same = (tensor.shape, tensor.stride(), tensor.dtype) == (whole.shape, whole.stride(), whole.dtype)
            if not same or not tensor.to_local().is_contiguous():
                wrong.append(f"{what} of {fqn}")
        if not torch.equal(param.full_tensor(), whole):
            wrong.append(f"values of {fqn}")
    if model.twin.weight is not model.stem.weight:
        wrong.append("the shared module")
    return {fqn: local(param) for fqn, param in model.named_parameters()}, wrong


@two_and_three_ranks
def test_shards_are_contiguous_and_join_to_the_whole_under_the_same_names(ranks: RankPool, world_size: int) -> None:
    answers = ranks.run(_shards, world_size)
    plain = dict(seeded(Shared).named_parameters())
    for shards, wrong in answers:
        assert wrong == []
        assert list(shards) == list(plain)
    for fqn, whole in plain.items():
        assert torch.equal(join([shards[fqn] for shards, _ in answers], whole), whole), fqn


def _is_plain(module: nn.Module) -> list[bool]:
    return [type(param) is nn.Parameter for param in module.parameters()]


def _registered() -> tuple[dict[str, list[list[bool]]], list[str]]:
    """Whether parameters are whole and plain in forwards and after them, and the root unit's states."""
    model = seeded(small_net)
    engine = shard(model)
    assert engine.root_unit is not None
    seen: dict[str, list[list[bool]]] = {"inside": [], "root": [], "after": []}
    states = [engine.root_unit.state.name]
    model.head.register_forward_hook(lambda module, args, output: seen["root"].append(_is_plain(module)))
    for block in model.blocks:
        block.linear.register_forward_hook(lambda module, args, output, b=block: seen["inside"].append(_is_plain(b)))
    loss = loss_of(model, rank_batches(engine, batches(1))[0])
    states.append(engine.root_unit.state.name)
    seen["after"].append(_is_plain(model))
    loss.backward()
    states.append(engine.root_unit.state.name)
    seen["after"].append(_is_plain(model))
    return seen, states


@two_and_three_ranks
def test_a_module_shows_whole_parameters_in_its_forward_only_and_the_root_unit_stays_until_backward(
    ranks: RankPool, world_size: int
) -> None:
    for seen, states in ranks.run(_registered, world_size):
        assert seen["inside"] == [[True] * 4] * NUM_BLOCKS
        assert seen["root"] == [[True] * 2]
        assert seen["after"] == [[False] * (4 * NUM_BLOCKS + 4)] * 2
        assert states == ["SHARDED", "UNSHARDED", "SHARDED"]


def _state_dict_after_a_forward() -> list[str]:
    """What is wrong with the state dict of a sharded module."""
    model, plain = seeded(small_net), seeded(small_net)
    shard(model)
    with torch.no_grad():
        model(batches(1)[0][0])
    state, params, wrong = model.state_dict(), dict(model.named_parameters()), []
    for fqn, whole in plain.state_dict().items():
        value = state.pop(fqn)
        if value.to_local().data_ptr() != params[fqn].to_local().data_ptr():
            wrong.append(f"{fqn} is on other memory")
        if not torch.equal(value.full_tensor(), whole):
            wrong.append(f"{fqn} has other values")
    return [*wrong, *state]


@two_and_three_ranks
def test_a_state_dict_has_the_same_keys_over_the_memory_of_the_shards(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_state_dict_after_a_forward, world_size) == [[]] * world_size


def _load_own_state() -> tuple[bool, bool]:
    """Load a copy of the state dict: into the same memory, with the values that it had."""
    model, plain = seeded(small_net), seeded(small_net)
    engine = shard(model)
    places = [param.to_local().data_ptr() for param in model.parameters()]
    state = {fqn: value.detach().clone() for fqn, value in model.state_dict().items()}
    optimizer = make_optimizer("sgd", model.parameters())
    loss_of(model, rank_batches(engine, batches(1))[0]).backward()
    optimizer.step()
    model.load_state_dict(state)
    x = batches(1)[0][0]
    return (
        places == [param.to_local().data_ptr() for param in model.parameters()],
        torch.equal(model(x).detach(), plain(x).detach()),
    )


@two_and_three_ranks
def test_loading_sharded_values_writes_them_back_in_place(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_load_own_state, world_size) == [(True, True)] * world_size


def _call_parts() -> tuple[str, bool, bool]:
    """A sharded sequential model keeps its class, and so does a part of it, which computes with the same shards."""
    model, plain = seeded(chain), seeded(chain)
    shard(model)
    part, x = model[:2], batches(1)[0][0]
    with torch.no_grad():
        same = torch.equal(part(x), plain[:2](x))
    return type(part).__name__, same, part[0].linear.weight is model[0].linear.weight


@two_and_three_ranks
def test_a_part_of_a_sequential_model_computes_with_the_same_shards(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_call_parts, world_size) == [("Sequential", True, True)] * world_size


def _clip_as_users_do(norm_type: float) -> tuple[float, float, float]:
    """The norm that torch's own function returns, that of the whole gradients, and how far clipped ones differ."""
    model, plain = seeded(small_net), seeded(small_net)
    shard(model)
    (batch,) = batches(1)
    loss_of(model, rows_of(batch, dist.get_rank(), dist.get_world_size())).backward()
    loss_of(plain, batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    whole = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return float(norm), float(whole), max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs)


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@two_and_three_ranks
def test_torchs_own_clipping_sees_the_whole_gradients(ranks: RankPool, world_size: int, norm_type: float) -> None:
    for norm, whole, difference in ranks.run(_clip_as_users_do, world_size, norm_type):
        assert norm == pytest.approx(whole, rel=1e-5)  # a sum in another order
        assert difference < 1e-6


def _messages_of_a_step() -> int:
    model = seeded(small_net)
    engine = shard(model)
    optimizer = make_optimizer("adamw", model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of(model, rank_batches(engine, batches(1))[0]).backward()
        optimizer.step()
    return sum("c10d" in event.name or "gloo" in event.name for event in profile.events())


def test_one_rank_sends_nothing(ranks: RankPool) -> None:
    assert ranks.run(_messages_of_a_step, 1) == [0]
    assert ranks.run(_messages_of_a_step, 2)[0] > 0, "the profiler sees messages"


def _edit_while_unsharded() -> tuple[bool, type]:
    """Before anything has been called, and again after a step."""
    model, plain = seeded(small_net), seeded(small_net)
    engine = shard(model)
    with unshard(model):
        before = all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    loss_of(model, rank_batches(engine, batches(1))[0]).backward()
    with unshard(model.blocks[0]):
        inside = type(model.blocks[0].linear.weight)
    return before, inside


@two_and_three_ranks
def test_a_module_can_be_unsharded_before_its_first_forward_and_in_part(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_edit_while_unsharded, world_size) == [(True, nn.Parameter)] * world_size


def _placements() -> set[str]:
    model = seeded(small_net)
    shard(model)
    return {type(param).__name__ for param in model.parameters()} | {str(model.head.weight.shape)}


@two_and_three_ranks
def test_a_sharded_parameter_has_the_type_of_its_layout_and_its_whole_shape(ranks: RankPool, world_size: int) -> None:
    name = "FlatShardedTensor" if layouts.current() == "flat" else "RowShardedTensor"
    assert ranks.run(_placements, world_size) == [{name, f"torch.Size([1, {WIDTH}])"}] * world_size
