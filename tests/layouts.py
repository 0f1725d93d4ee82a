"""The layout that a test runs in, in the pytest process and on its ranks.

A test module that says `pytestmark = both_layouts` runs once in each; `engine_cases.shard` and
`pooled_trainer.make_strategy` build what the running test asks for.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")

both_layouts = pytest.mark.usefixtures("layout")

_current = "per_parameter"


def current() -> str:
    """The layout of the running test."""
    return _current


def choose(layout: str) -> None:
    """From here on, tests run in this layout."""
    global _current  # noqa: PLW0603 - one test runs at a time
    _current = layout


def call(layout: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function on a rank, in a layout."""
    choose(layout)
    return function(*args, **kwargs)
