"""The row: one measured number, the goal it is held against, and how it was obtained."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Goal:
    """What a value should be: at most, or at least, a limit."""

    relation: Literal["<=", ">="]
    limit: float

    def met_by(self, value: float) -> bool:
        """Whether a value is on the right side; the limit itself is, NaN never."""
        return _COMPARISONS[self.relation](value, self.limit)

    def __str__(self) -> str:
        return f"{self.relation} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One line of the table. A row without a goal explains another one."""

    name: str
    value: float
    unit: str
    goal: Goal | None
    how: str

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        return None if self.goal is None else self.goal.met_by(self.value)

    @property
    def ratio(self) -> float | None:
        """The value as a multiple of its goal's limit; None without one."""
        return None if self.goal is None else self.value / self.goal.limit

    def as_json(self) -> dict[str, Any]:
        """For bench.json."""
        goal = None if self.goal is None else str(self.goal)
        return {**asdict(self), "goal": goal, "met": self.met, "ratio": self.ratio}


def spread(values: Sequence[float]) -> str:
    """How many values a median stands for and how far they lie apart, for a row's `how`."""
    ordered = sorted(values)
    return f"p50 {median(ordered):.3g} of {len(ordered)}, {ordered[0]:.3g} to {ordered[-1]:.3g}"


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [("what", "value", "unit", "goal", "x goal", "met")]
    for row in rows:
        goal = "-" if row.goal is None else str(row.goal)
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        met = {None: "-", True: "yes", False: "NO"}[row.met]
        lines.append((row.name, f"{row.value:.2f}", row.unit, goal, ratio, met))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
