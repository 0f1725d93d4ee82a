"""The layout that a test runs in, in the pytest process and on its ranks.

A test module that says `pytestmark = both_layouts` runs once in each; `engine_cases.shard` and
`pooled_trainer.make_strategy` build what the running test asks for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")

both_layouts = pytest.mark.usefixtures("layout")

_current = "per_parameter"


def current() -> str:
    """The layout of the running test."""
    return _current


def other() -> str:
    """The layout that the running test is not in."""
    return "flat" if _current == "per_parameter" else "per_parameter"


@contextmanager
def using(layout: str) -> Iterator[None]:
    """Inside the block, tests run in this layout."""
    global _current  # noqa: PLW0603 - one test runs at a time
    before, _current = _current, layout
    try:
        yield
    finally:
        _current = before


def call(layout: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function on a rank, in a layout."""
    with using(layout):
        return function(*args, **kwargs)
