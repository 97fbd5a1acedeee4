"""What callers on the trainer's side give by hand: what cannot be is refused at once, with what to give instead."""

from __future__ import annotations

import math
from numbers import Real

from orchestrator.errors import FarmError


def require_seconds(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise FarmError for what is no number of seconds; infinitely many are one."""
    if value is None and or_none:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise FarmError(f"{name} is a number of seconds{', or None' if or_none else ''}, got {value!r}: give a float")


def require_kind(name: str, value: object, kind: type, example: str) -> None:
    """Raise FarmError for what is neither None nor of this kind."""
    if value is not None and not isinstance(value, kind):
        raise FarmError(f"{name} takes a {kind.__name__}, got {type(value).__name__}: give {example}")
