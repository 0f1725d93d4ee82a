"""Who owns which elements, and where they lie: exact, without process groups."""

import dataclasses
import math

import pytest
import torch

from fsdp_strategy.engine.cut import ALIGN_NBYTES, ParamSpec, RowCut, align, cut_flat, cut_rows, shard_bounds
from fsdp_strategy.engine.layout import (
    DIRECT_MIN_NBYTES,
    MessagePolicy,
    SpanLayout,
    copy_in_index,
    copy_in_runs,
    copy_out_index,
    plan_messages,
    plan_reduction,
    plan_span,
)

WORLD_SIZES = [1, 2, 3, 4, 7, 64]
POLICIES = [MessagePolicy(equal_pieces=False), MessagePolicy(equal_pieces=True)]

# Dim 0 below every world size, odd, and above; exactly the direct size, just below it, and large odd ones.
SHAPES = [(1,), (2, 3), (3,), (5, 7), (64, 3, 3), (128, 128), (16383,), (1401, 13), (7, 4096), (512,), (1, 20000)]
FLOAT_NBYTES = 4

every_policy = pytest.mark.parametrize("policy", POLICIES, ids=["any_pieces", "equal_pieces"])
every_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


def _spec(shape: tuple[int, ...], fqn: str = "p") -> ParamSpec:
    return ParamSpec(fqn, shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))))


SPECS = tuple(_spec(shape, f"p{i}") for i, shape in enumerate(SHAPES))


def _plan(world_size: int, rank: int, policy: MessagePolicy, specs: tuple[ParamSpec, ...] = SPECS) -> SpanLayout:
    return plan_span(specs, FLOAT_NBYTES, shard_world_size=world_size, shard_rank=rank, policy=policy)


def _plans(world_size: int, policy: MessagePolicy) -> list[SpanLayout]:
    return [_plan(world_size, rank, policy) for rank in range(world_size)]


def _assert_apart(places: list[tuple[int, int]], end: int) -> None:
    """(start, numel) ranges do not overlap and lie within [0, end)."""
    last = 0
    for start, numel in sorted(places):
        assert start >= last
        last = start + numel
    assert last <= end


@every_world_size
@pytest.mark.parametrize("dim0", [1, 2, 3, 4, 5, 6, 7, 9, 63, 64, 65, 129, 512])
def test_shard_bounds_cut_as_torch_chunk_does(dim0: int, world_size: int) -> None:
    rows = torch.arange(dim0)
    chunks = [chunk.tolist() for chunk in rows.chunk(world_size)]
    chunks += [[]] * (world_size - len(chunks))
    bounds = [shard_bounds(dim0, world_size, rank) for rank in range(world_size)]
    assert [rows[first:last].tolist() for first, last in bounds] == chunks


def test_trailing_ranks_may_own_nothing() -> None:
    assert [shard_bounds(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


@every_policy
@every_world_size
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
def test_unsharded_parameters_start_at_cache_lines_and_do_not_overlap(
    world_size: int, policy: MessagePolicy, itemsize: int
) -> None:
    layout = plan_span(SPECS, itemsize, shard_world_size=world_size, shard_rank=0, policy=policy)
    assert all(start * itemsize % ALIGN_NBYTES == 0 for start in layout.starts)
    _assert_apart([(s, spec.numel) for s, spec in zip(layout.starts, SPECS, strict=True)], layout.unsharded_numel)


@every_policy
@every_world_size
def test_shards_of_one_rank_do_not_overlap_and_have_their_rows(world_size: int, policy: MessagePolicy) -> None:
    for rank, layout in enumerate(_plans(world_size, policy)):
        places = [(start, layout.shard_param_numel(i)) for i, start in enumerate(layout.shard_starts)]
        _assert_apart(places, layout.shard_numel)
        for (_, numel), spec in zip(places, SPECS, strict=True):
            first, last = shard_bounds(spec.shape[0], world_size, rank)
            assert numel == (last - first) * math.prod(spec.shape[1:])


@every_policy
@every_world_size
def test_shards_of_all_ranks_hold_every_element_once(world_size: int, policy: MessagePolicy) -> None:
    plans = _plans(world_size, policy)
    held = [sum(layout.shard_param_numel(i) for layout in plans) for i in range(len(SPECS))]
    assert held == [spec.numel for spec in SPECS]
    assert {layout.numel for layout in plans} == {sum(spec.numel for spec in SPECS)}


@every_policy
@every_world_size
def test_everything_but_rows_and_shard_places_is_the_same_on_every_rank(world_size: int, policy: MessagePolicy) -> None:
    plans = _plans(world_size, policy)
    shared = {(p.starts, p.unsharded_numel, tuple((m.param, m.starts, m.numels) for m in p.direct)) for p in plans}
    assert len(shared) == 1
    assert len({p.packed and (p.packed.params, p.packed.numels, p.packed.piece_numels) for p in plans}) == 1


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_large_parameters_travel_alone_and_small_ones_together(world_size: int) -> None:
    layout = _plan(world_size, 0, POLICIES[0])
    large = {i for i, spec in enumerate(SPECS) if spec.numel * FLOAT_NBYTES >= DIRECT_MIN_NBYTES}
    assert {message.param for message in layout.direct} == large
    assert layout.packed is not None
    assert set(layout.packed.params) == set(range(len(SPECS))) - large
    assert (128, 128) in [SHAPES[i] for i in large], "a parameter of exactly the direct size travels alone"


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_equal_pieces_let_only_evenly_divisible_parameters_travel_alone(world_size: int) -> None:
    layout = _plan(world_size, 0, POLICIES[1])
    for message in layout.direct:
        assert len(set(message.numels)) == 1
        assert message.numels[0] * FLOAT_NBYTES % 16 == 0
    alone = {SHAPES[message.param] for message in layout.direct}
    assert ((128, 128) in alone) == (128 % world_size == 0)
    assert ((7, 4096) in alone) == (world_size == 7)
    assert (1, 20000) not in alone


@every_world_size
def test_payloads_of_all_ranks_sum_to_the_parameters_where_pieces_may_differ(world_size: int) -> None:
    plans = _plans(world_size, POLICIES[0])
    assert sum(layout.payload_numel() for layout in plans) == sum(spec.numel for spec in SPECS)
    assert [p.sent_numel() for p in plans] == [(world_size - 1) * p.payload_numel() for p in plans]


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_equal_pieces_are_the_largest_payload_padded_to_whole_cache_lines(world_size: int) -> None:
    plans = _plans(world_size, POLICIES[1])
    for layout in plans:
        packed = layout.packed
        assert packed is not None
        assert len(set(packed.piece_numels)) == 1
        assert 0 <= packed.piece_numels[0] - max(packed.numels) < ALIGN_NBYTES // FLOAT_NBYTES
        assert packed.piece_numels[0] * FLOAT_NBYTES % 16 == 0
        assert packed.shard_start + packed.piece_numels[0] <= layout.shard_numel
    assert len({layout.payload_numel() for layout in plans}) == 1


@every_policy
def test_one_rank_sends_nothing_and_its_shard_is_the_unsharded_span(policy: MessagePolicy) -> None:
    layout = _plan(1, 0, policy)
    assert layout.sent_numel() == 0
    assert layout.packed is None
    assert layout.shard_starts == layout.starts
    assert layout.shard_numel == layout.unsharded_numel


def _filled_shards(plans: list[SpanLayout], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's shard buffer with its rows of the parameters; -1 where none lies."""
    shards = []
    for layout in plans:
        shard = torch.full((layout.shard_numel,), -1)
        for i, value in enumerate(values):
            layout.shard_view(shard, i).copy_(
                layout.cuts[i].piece_of(value, layout.shard_rank).view_as(layout.shard_view(shard, i))
            )
        shards.append(shard)
    return shards


def _pieces(plans: list[SpanLayout], shards: list[torch.Tensor]) -> torch.Tensor:
    """The packed pieces of all ranks, laid rank after rank."""
    pieces = []
    for rank, (layout, shard) in enumerate(zip(plans, shards, strict=True)):
        assert layout.packed is not None
        begin = layout.packed.shard_start
        pieces.append(shard[begin : begin + layout.packed.piece_numels[rank]])
    return torch.cat(pieces)


@every_policy
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_copy_out_puts_every_element_of_the_pieces_into_its_parameter(world_size: int, policy: MessagePolicy) -> None:
    plans = _plans(world_size, policy)
    values = [torch.arange(spec.numel).view(spec.shape) + 100_000 * i for i, spec in enumerate(SPECS)]
    pieces = _pieces(plans, _filled_shards(plans, values))
    for layout in (plans[0], plans[-1]):
        assert layout.packed is not None
        region = pieces[copy_out_index(layout)]
        assert region.numel() == layout.packed.region_numel
        for i in layout.packed.params:
            begin = layout.starts[i] - layout.packed.start
            assert torch.equal(region[begin : begin + SPECS[i].numel].view(SHAPES[i]), values[i])


@every_policy
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_copy_in_puts_every_element_into_the_piece_of_its_owner(world_size: int, policy: MessagePolicy) -> None:
    plans = _plans(world_size, policy)
    values = [torch.arange(spec.numel).view(spec.shape) + 100_000 * i for i, spec in enumerate(SPECS)]
    expected = _pieces(plans, _filled_shards(plans, values))
    packed = plans[0].packed
    assert packed is not None
    pieces = torch.cat([values[i].flatten() for i in packed.params])[copy_in_index(plans[0])]
    payload = expected != -1
    assert torch.equal(pieces[payload], expected[payload])
    assert int(payload.sum()) == sum(packed.numels)


@every_policy
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_direct_pieces_of_all_ranks_tile_their_parameter(world_size: int, policy: MessagePolicy) -> None:
    for rank, layout in enumerate(_plans(world_size, policy)):
        for message in layout.direct:
            spec = SPECS[message.param]
            ends = [start + numel for start, numel in zip(message.starts, message.numels, strict=True)]
            assert message.starts[0] == layout.starts[message.param]
            assert list(message.starts[1:]) == ends[:-1]
            assert ends[-1] == layout.starts[message.param] + spec.numel
            assert message.shard_start == layout.shard_starts[message.param]
            assert message.numels[rank] == layout.shard_param_numel(message.param)


@every_policy
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_a_0d_parameter_is_on_every_rank_and_comes_from_its_own_piece(world_size: int, policy: MessagePolicy) -> None:
    specs = (_spec((3,)), _spec(()), _spec((2, 2)))
    plans = [_plan(world_size, rank, policy, specs) for rank in range(world_size)]
    values = [torch.tensor([10, 11, 12]), torch.tensor(20), torch.tensor([[30, 31], [32, 33]])]
    for rank, layout in enumerate(plans):
        assert layout.shard_param_numel(1) == 1
        packed = layout.packed
        assert packed is not None
        pieces = torch.cat([value.flatten() for value in values])[copy_in_index(layout)]
        begin = sum(packed.piece_numels[:rank])
        piece = pieces[begin : begin + packed.piece_numels[rank]]
        assert piece[layout.shard_starts[1] - packed.shard_start] == 20
        region = torch.arange(sum(packed.piece_numels))[copy_out_index(layout)]
        own = region[layout.starts[1] - packed.start]
        assert begin <= own < begin + packed.piece_numels[rank], "no other rank's value is read"


@every_policy
def test_a_complex_parameter_is_laid_out_as_pairs_of_real_numbers(policy: MessagePolicy) -> None:
    spec = ParamSpec("c", (5, 3), (3, 1), is_complex=True)
    assert (spec.numel, spec.row_numel, spec.dim0) == (30, 6, 5)
    plans = [_plan(2, rank, policy, (spec,)) for rank in range(2)]
    assert [layout.shard_param_numel(0) for layout in plans] == [18, 12]
    flat = torch.arange(24.0)
    rows = RowCut(spec, 2).view(flat, 4, 1)
    assert rows.shape == (2, 3)
    assert rows[1, 2] == complex(14, 15)


def test_the_direct_size_counts_bytes_on_the_wire() -> None:
    spec = (_spec((128, 128)),)
    in_float32, in_bfloat16 = (
        plan_span(spec, itemsize, shard_world_size=2, shard_rank=0, policy=POLICIES[0]) for itemsize in (4, 2)
    )
    assert len(in_float32.direct) == 1
    assert in_float32.packed is None
    assert not in_bfloat16.direct
    assert in_bfloat16.packed is not None


def test_layouts_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _plan(2, 0, POLICIES[0]).shard_numel = 0  # type: ignore[misc]


# -- flat -------------------------------------------------------------------------------------------------------------


def _flat_plans(world_size: int, specs: tuple[ParamSpec, ...] = SPECS) -> list[SpanLayout]:
    return [
        plan_span(specs, FLOAT_NBYTES, layout="flat", shard_world_size=world_size, shard_rank=rank, policy=POLICIES[0])
        for rank in range(world_size)
    ]


@every_world_size
def test_flat_pieces_are_equal_and_as_small_as_the_alignment_allows(world_size: int) -> None:
    for layout in _flat_plans(world_size):
        (message,) = layout.direct
        assert layout.packed is None
        assert len(set(message.numels)) == 1
        assert message.starts == tuple(range(0, layout.unsharded_numel, layout.shard_numel))
        end_to_end = sum(align(spec.numel, FLOAT_NBYTES) for spec in SPECS)
        assert layout.shard_numel == align(-(-end_to_end // world_size), FLOAT_NBYTES)


@every_world_size
def test_the_pieces_of_all_ranks_are_the_flat_span(world_size: int) -> None:
    plans = _flat_plans(world_size)
    values = [torch.arange(spec.numel).view(spec.shape) + 100_000 * i for i, spec in enumerate(SPECS)]
    span = torch.cat(_filled_shards(plans, values))
    for layout in (plans[0], plans[-1]):
        for value, start in zip(values, layout.starts, strict=True):
            assert start * FLOAT_NBYTES % ALIGN_NBYTES == 0
            assert torch.equal(span[start : start + value.numel()], value.flatten())


@every_policy
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
@pytest.mark.parametrize("reduced", [range(len(SPECS)), [1, 4, 5, 9]], ids=["all_trainable", "some_frozen"])
def test_flat_reductions_bring_every_element_to_its_owner(
    world_size: int, policy: MessagePolicy, reduced: list[int]
) -> None:
    cuts = [cut_flat(SPECS, FLOAT_NBYTES, world_size)[i] for i in reduced]
    values = [torch.arange(cut.spec.numel) + 100_000 * i for i, cut in enumerate(cuts)]
    for rank in range(world_size):
        layout = plan_messages(cuts, FLOAT_NBYTES, shard_rank=rank, policy=policy)
        shard = torch.full((layout.shard_numel,), -1)
        for message in layout.direct:
            first, last = cuts[message.param].bounds(rank)
            assert message.starts[rank] - layout.starts[message.param] == first
            shard[message.shard_start : message.shard_start + last - first] = values[message.param][first:last]
        if layout.packed is not None:
            pieces = torch.full((sum(layout.packed.piece_numels),), -1)
            for param, first, numel, start in copy_in_runs(layout):
                pieces[start : start + numel] = values[param][first : first + numel]
            begin = sum(layout.packed.piece_numels[:rank])
            numel = layout.packed.piece_numels[rank]
            shard[layout.packed.shard_start : layout.packed.shard_start + numel] = pieces[begin : begin + numel]
        for i, (value, cut) in enumerate(zip(values, cuts, strict=True)):
            assert torch.equal(layout.shard_view(shard, i), cut.piece_of(value.view(cut.spec.shape), rank))


def test_runs_of_a_flat_span_are_hardly_more_than_its_parameters() -> None:
    layout = plan_messages(cut_flat(SPECS, FLOAT_NBYTES, 64), FLOAT_NBYTES, shard_rank=0, policy=POLICIES[1])
    assert layout.packed is not None
    assert len(copy_in_runs(layout)) < len(layout.packed.params) + 64


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_flat_cut_never_divides_a_complex_number(world_size: int) -> None:
    specs = (_spec((3,)), ParamSpec("c", (5, 3), (3, 1), is_complex=True))
    for cut in cut_flat(specs, FLOAT_NBYTES, world_size):
        assert all(bound % 2 == 0 for rank in range(world_size) for bound in cut.bounds(rank) if cut.spec.is_complex)


def test_a_flat_piece_follows_the_memory_order_of_a_channels_last_parameter() -> None:
    value = torch.arange(2 * 3 * 2 * 2).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    spec = ParamSpec("w", tuple(value.shape), value.stride())
    (cut,) = cut_flat((spec,), FLOAT_NBYTES, 2)
    pieces = torch.cat([cut.piece_of(value, rank) for rank in range(2)])
    assert torch.equal(pieces, value.permute(0, 2, 3, 1).flatten())
    assert torch.equal(spec.from_memory_order(pieces), value)
    assert torch.equal(cut.piece_of(value.contiguous(), 0), cut.piece_of(value, 0))


@pytest.mark.parametrize("world_size", [2, 7])
def test_a_flat_span_is_reduced_as_a_whole_only_where_all_of_it_is_trainable(world_size: int) -> None:
    layout = _flat_plans(world_size)[1]
    trainable = [True] * len(SPECS)
    assert plan_reduction(layout, trainable, FLOAT_NBYTES, POLICIES[1]) is layout
    for others in (plan_reduction(layout, trainable, FLOAT_NBYTES, POLICIES[0]),
                   plan_reduction(layout, [False, *trainable[1:]], FLOAT_NBYTES, POLICIES[1])):  # fmt: skip
        assert not others.is_whole
        assert [others.shard_param_numel(i) for i in range(len(others.cuts))] == [
            layout.shard_param_numel(i) for i in range(len(SPECS) - len(others.cuts), len(SPECS))
        ]


@every_world_size
def test_all_ranks_at_once_own_what_each_owns(world_size: int) -> None:
    specs = (*SPECS, _spec(()), _spec((0, 3)), ParamSpec("c", (5, 3), (3, 1), is_complex=True))
    for cut in (*cut_rows(specs, world_size), *cut_flat(specs, FLOAT_NBYTES, world_size)):
        assert cut.numels() == [cut.numel(rank) for rank in range(world_size)]
