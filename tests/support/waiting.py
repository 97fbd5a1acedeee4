"""Waiting for a condition with a bound, instead of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSE_SECONDS = 0.01


def wait_until(condition: Callable[[], T], *, seconds: float = 10, description: str) -> T:
    """The condition's first true answer; fails with the description and its last answer when time runs out."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain until {description}; last answer: {answer!r}")
        time.sleep(_PAUSE_SECONDS)
    return answer
