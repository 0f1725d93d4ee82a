"""The order of an iteration as data: rounds, places, and how far ahead to gather."""

import pytest

from fsdp_strategy.engine.schedule import Op, Round, Schedule, ScheduleRecording


def _gather(unit: int) -> Op:
    return Op(is_reduction=False, unit=unit)


def _reduce(unit: int) -> Op:
    return Op(is_reduction=True, unit=unit)


# The root unit 0 and two blocks: places 0 to 2 are the forward, 3 to 7 the backward.
STEP = Round((*map(_gather, (0, 1, 2)), _gather(2), _reduce(2), _gather(1), _reduce(1), _reduce(0)))


@pytest.mark.parametrize(
    ("unit", "cursor", "place"),
    [(0, 0, 0), (0, 1, None), (2, 0, 2), (2, 3, 3), (2, 4, None), (1, 0, 1), (1, 2, 5), (1, 6, None), (9, 0, None)],
)
def test_find_gather_gives_the_first_gather_of_the_unit_that_is_not_done(
    unit: int, cursor: int, place: int | None
) -> None:
    assert STEP.find_gather(unit, cursor) == place


@pytest.mark.parametrize(
    ("cursor", "limit", "places"),
    [(0, 0, []), (0, 1, [0]), (1, 2, [1, 2]), (3, 2, [3, 5]), (4, 1, [5]), (4, 9, [5]), (6, 3, []), (8, 1, [])],
)
def test_prefetch_looks_past_reductions_as_far_as_the_limit_and_not_past_the_end(
    cursor: int, limit: int, places: list[int]
) -> None:
    assert list(STEP.next_to_unshard(cursor, limit)) == places


def test_a_schedule_ends_after_its_last_round() -> None:
    validation = Round((_gather(0),))
    schedule = Schedule((STEP, validation))
    assert [schedule.round(index) for index in range(4)] == [STEP, validation, None, None]


def test_a_recording_keeps_the_rounds_apart() -> None:
    recording = ScheduleRecording()
    recording.ops += [_gather(0), _reduce(0)]
    recording.end_round()
    recording.ops += [_gather(1)]
    recording.end_round()
    assert recording.rounds == [Round((_gather(0), _reduce(0))), Round((_gather(1),))]


def test_a_recorded_round_does_not_change_with_the_recording() -> None:
    recording = ScheduleRecording()
    recording.ops += [_gather(0)]
    recording.end_round()
    recording.ops += [_gather(7)]
    assert recording.rounds[0].ops == (_gather(0),)
