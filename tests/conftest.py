"""Fixtures for all tests: the rank pool, and the guard against what a test leaves behind."""

import os

# Before torch and numpy are imported: ranks are forked from this process, and thread pools do not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch

from fsdp_strategy.engine.engine import LAYOUTS
from tests import layouts
from tests.isolation import process_restored
from tests.rank_pool import RankPool
from tests.rank_worker import Nursery

torch.set_num_threads(1)

_NURSERY = pytest.StashKey[Nursery]()


def pytest_collection_finish(session: pytest.Session) -> None:
    # The last moment at which everything is imported, pytest's warning filters hold, and no test has run.
    session.config.stash[_NURSERY] = Nursery()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _NURSERY in session.config.stash:
        session.config.stash[_NURSERY].close()


@pytest.fixture(scope="session")
def nursery(pytestconfig: pytest.Config) -> Nursery:
    return pytestconfig.stash[_NURSERY]


@pytest.fixture(scope="session")
def ranks(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """The pool of rank processes: `ranks.run(function, world_size, *args)`."""
    with RankPool(nursery, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test in each layout; see `tests.layouts`."""
    with layouts.using(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with process_restored() as leaks:
        yield
    if leaks:
        pytest.fail("The test left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture
def trainer_process() -> Iterator[None]:
    """For tests that start a Trainer in the pytest process: Lightning's launchers leave MASTER_PORT and the like."""
    with process_restored():
        yield
