"""The order of an iteration as data: rounds, places, and how far ahead to gather."""

import pytest

from fsdp_strategy.engine.schedule import Op, Round, Schedule, ScheduleRecording


def gather(unit: int) -> Op:
    return Op(False, unit)


def reduction(unit: int) -> Op:
    return Op(True, unit)


# Places:       0          1          2          3          4             5          6             7
TRAINING = Round(
    (gather(0), gather(1), gather(2), gather(2), reduction(2), gather(1), reduction(1), reduction(0))
)  # the root unit (0) once, blocks in forward and backward


@pytest.mark.parametrize(
    ("unit", "cursor", "place"),
    [(0, 0, 0), (0, 1, None), (2, 0, 2), (2, 3, 3), (2, 4, None), (1, 0, 1), (1, 2, 5), (1, 6, None), (9, 0, None)],
)
def test_find_gather_gives_the_first_place_not_yet_passed(unit: int, cursor: int, place: int | None) -> None:
    assert TRAINING.find_gather(unit, cursor) == place


@pytest.mark.parametrize(
    ("cursor", "limit", "places"),
    [(0, 0, []), (0, 1, [0]), (1, 2, [1, 2]), (3, 2, [3, 5]), (4, 1, [5]), (6, 5, []), (8, 3, [])],
)
def test_prefetch_looks_at_gathers_only_and_no_further_than_the_limit(
    cursor: int, limit: int, places: list[int]
) -> None:
    assert TRAINING.next_to_unshard(cursor, limit) == places


def test_a_schedule_ends_after_its_last_round() -> None:
    first, second = Round((gather(0), reduction(0))), Round((gather(1),))
    schedule = Schedule((first, second))
    assert [schedule.round(index) for index in range(4)] == [first, second, None, None]


def test_a_recording_keeps_the_rounds_apart() -> None:
    recording = ScheduleRecording()
    recording.ops += [gather(0), reduction(0)]
    recording.end_round()
    recording.ops += [gather(1)]
    recording.end_round()
    assert recording.rounds == [Round((gather(0), reduction(0))), Round((gather(1),))]


def test_a_recorded_round_does_not_change_with_the_recording() -> None:
    recording = ScheduleRecording()
    recording.ops += [gather(0)]
    recording.end_round()
    recording.ops += [gather(7)]
    assert recording.rounds[0].ops == (gather(0),)
