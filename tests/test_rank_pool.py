"""The rank pool tells what every rank did, and survives ranks that fail, die or hang."""

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.rank_pool import RankPool
from tests.rank_worker import Nursery

WORLD_SIZES = [1, 2, 3, 4]

# Made while pytest collects, as a library's logger is that the test module imports.
logging.getLogger("tests.early").addHandler(logging.StreamHandler())


@pytest.fixture(scope="module")
def short_ranks(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(nursery, tmp_path_factory.mktemp("short_ranks"), timeout_s=1.5) as pool:
        yield pool


def _rank_and_world_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _sum_over_ranks(value: Tensor, *, scale: float = 1.0) -> Tensor:
    total = value * scale * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def _fail_on(rank: int) -> None:
    print(f"output of rank {dist.get_rank()}")
    if dist.get_rank() == rank:
        found = "a value"
        assert found == "another value"


def _fail_on_rank_0_while_the_others_wait() -> None:
    if dist.get_rank() == 0:
        raise LookupError("nothing here")
    dist.barrier()


def _hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.01)


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def _warn() -> None:
    warnings.warn("not now", RuntimeWarning, stacklevel=1)


def _fail_the_test() -> None:
    pytest.fail("refused")


def _return_a_function() -> object:
    return lambda: None


def _leave_a_variable() -> None:
    os.environ["LOCAL_RANK"] = "7"


def _local_rank() -> str | None:
    return os.environ.get("LOCAL_RANK")


def _destroy_the_group() -> None:
    dist.destroy_process_group()


def _random_number() -> float:
    return torch.rand(()).item()


def _gradient_of_square(value: float) -> float:
    leaf = torch.tensor(value, requires_grad=True)
    (gradient,) = torch.autograd.grad(leaf.square(), leaf)
    return gradient.item()


def _write_to_both_streams_and_fail() -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)
    os.write(1, b"to the descriptor\n")
    logging.getLogger("tests.early").warning("to a logger")
    raise LookupError


def _process_id() -> int:
    return os.getpid()


def _threads() -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_results_come_back_in_rank_order(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_rank_and_world_size, world_size) == [(rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_tensors_travel_by_value(ranks: RankPool, world_size: int) -> None:
    value = torch.arange(5.0)
    results = ranks.run(_sum_over_ranks, world_size, value, scale=2.0)
    for result in results:
        assert torch.equal(result, value * 2.0 * sum(range(1, world_size + 1)))


@pytest.mark.parametrize("world_size", [0, 5])
def test_a_world_size_that_the_pool_lacks_is_refused(ranks: RankPool, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"Expected a world size of 1 to 4, got {world_size}"):
        ranks.run(_process_id, world_size)


def test_a_function_that_ranks_cannot_look_up_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="Expected a module-level function"):
        ranks.run(lambda: None, 1)


def test_ranks_are_reused(ranks: RankPool) -> None:
    assert ranks.run(_process_id, 2) == ranks.run(_process_id, 4)[:2]


def test_ranks_compute_with_one_thread(ranks: RankPool) -> None:
    assert ranks.run(_threads, 2) == [1, 1]


def test_ranks_start_from_different_seeds_that_repeat(ranks: RankPool) -> None:
    first = ranks.run(_random_number, 2)
    assert first == ranks.run(_random_number, 2)
    assert first[0] != first[1]


def test_a_failing_rank_is_reported_with_its_traceback_and_its_values(ranks: RankPool) -> None:
    with pytest.raises(AssertionError) as failure:
        ranks.run(_fail_on, 3, 1)
    report = str(failure.value)
    assert "`_fail_on` failed on 1 of 3 ranks" in report
    assert "rank 1: raised" in report
    assert "in _fail_on" in report
    assert "AssertionError: assert 'a value' == 'another value'" in report
    for rank in range(3):
        assert f"output of rank {rank}" in report


def test_streams_descriptors_and_loggers_are_in_the_report(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"(?s)LookupError.*to stdout\nto stderr\nto the descriptor\nto a logger"):
        ranks.run(_write_to_both_streams_and_fail, 1)


def test_ranks_that_wait_for_a_failed_one_are_reported_without_waiting_for_the_group(ranks: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        ranks.run(_fail_on_rank_0_while_the_others_wait, 2)
    assert time.monotonic() - start < 10  # the group itself would wait for 30 s
    report = str(failure.value)
    assert "failed on 2 of 2 ranks" in report
    assert "LookupError: nothing here" in report
    assert "in barrier" in report


def test_a_hang_names_the_rank_and_shows_where_it_is(short_ranks: RankPool) -> None:
    with pytest.raises(AssertionError) as failure:
        short_ranks.run(_hang_on, 2, 1)
    report = str(failure.value)
    assert "failed on 1 of 2 ranks" in report
    assert "rank 0: returned" in report
    assert "rank 1: still running" in report
    assert "in _hang_on" in report
    assert "_run_nursery" not in report


def test_a_rank_that_dies_is_named_with_its_signal_and_its_stack(ranks: RankPool) -> None:
    with pytest.raises(AssertionError) as failure:
        ranks.run(_die_on, 2, 1)
    report = str(failure.value)
    assert "rank 1: died, killed by SIGSEGV" in report
    assert "in _die_on" in report


def test_a_warning_fails_the_rank(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="RuntimeWarning: not now"):
        ranks.run(_warn, 1)


def test_a_failure_that_pytest_raised_is_reported(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="Failed: refused"):
        ranks.run(_fail_the_test, 1)


def test_a_result_that_cannot_be_pickled_is_reported(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"rank 0: raised"):
        ranks.run(_return_a_function, 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_pool_works_after_a_failure(ranks: RankPool, world_size: int) -> None:
    before = ranks.run(_process_id, world_size)
    with pytest.raises(AssertionError):
        ranks.run(_fail_on, world_size, 0)
    after = ranks.run(_process_id, world_size)
    assert set(before).isdisjoint(after)


def test_the_pool_works_after_a_hang(short_ranks: RankPool) -> None:
    with pytest.raises(AssertionError):
        short_ranks.run(_hang_on, 2, 0)
    with short_ranks.timeout(30):
        assert short_ranks.run(_rank_and_world_size, 2) == [(0, 2), (1, 2)]


def test_a_call_may_be_given_more_time(short_ranks: RankPool) -> None:
    with short_ranks.timeout(30):
        short_ranks.run(time.sleep, 1, 2)
    with pytest.raises(AssertionError, match="still running"):
        short_ranks.run(time.sleep, 1, 60)


def test_an_environment_variable_does_not_reach_the_next_call(ranks: RankPool) -> None:
    ranks.run(_leave_a_variable, 2)
    assert ranks.run(_local_rank, 2) == [None, None]


def test_a_rank_may_destroy_the_group_itself(ranks: RankPool) -> None:
    ranks.run(_destroy_the_group, 2)
    assert ranks.run(_rank_and_world_size, 2) == [(0, 2), (1, 2)]


def test_new_ranks_can_run_backward_after_the_pytest_process_has(nursery: Nursery, tmp_path: Path) -> None:
    assert _gradient_of_square(1.5) == 3.0
    with RankPool(nursery, tmp_path) as pool:
        assert pool.run(_gradient_of_square, 1, 2.5) == [5.0]


def test_a_closed_pool_leaves_no_process(nursery: Nursery, tmp_path: Path) -> None:
    with RankPool(nursery, tmp_path) as pool:
        process_ids = pool.run(_process_id, 2)
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
