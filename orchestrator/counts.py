"""What a receipt adds to the farm's totals, and how totals are spelled: the fields of farm:counters. Pure.

What always holds: totals are integers (microseconds, millionths of a reward, pico-dollars), so adding them up loses
nothing; what a receipt adds is added in the very write that writes it. A histogram keeps one field for each of its
bounds, counting what fell under that bound and over the one before: bounds can change later and old counts stay right.

    tool_calls:<tool>:<result>        ok, failed, timed_out or lost
    <histogram>[:<label>]:le:<bound>  how many fell there
    <histogram>[:<label>]:sum         what they add up to, in the histogram's units
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from orchestrator.records import Operation, Receipt

INFINITE = "+Inf"

TOOLS = ("terminal", "submit")
RESULTS = ("ok", "failed", "timed_out", "lost")


@dataclass(frozen=True)
class Histogram:
    """A histogram's key, its upper bounds and how many of its units are one."""

    key: str
    bounds: tuple[str, ...]
    units: int

    def under(self, amount: int) -> str:
        """The bound that so many units fall under."""
        return next((bound for bound in self.bounds if amount <= Decimal(bound) * self.units), INFINITE)


PHASE = Histogram(
    "phase",
    ("0.01", "0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10", "30", "60", "120", "300", "600", "900"),
    10**6,
)
TOOL_CALL = Histogram(
    "tool_call", ("0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1", "2.5", "5", "10"), 10**6
)
REWARD = Histogram("reward", ("0", "0.25", "0.5", "0.75", "1"), 10**6)
COST = Histogram("episode_cost", ("0.0001", "0.0003", "0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "1"), 10**12)
"""Counted by the scripts, once nothing of the episode can cost any more: with its receipt or with its last sandbox."""


@dataclass(frozen=True)
class Distribution:
    """A histogram as counted: (bound, how many fell under it or a lower one), ending with +Inf, and their sum."""

    buckets: tuple[tuple[str, int], ...]
    sum: Decimal


def counts_of(receipt: Receipt) -> dict[str, int]:
    """What this receipt adds, besides its outcome."""
    counts: Counter[str] = Counter()
    for step in receipt.operations:
        if step.name in TOOLS:
            counts[f"tool_calls:{step.name}:{_result(step, scored=receipt.outcome.scored)}"] += 1
        if step.name == "terminal":
            _observe(counts, TOOL_CALL, step.seconds)
    for phase, seconds in receipt.phases.items():
        _observe(counts, PHASE, seconds, label=phase)
    if receipt.reward is not None:
        _observe(counts, REWARD, receipt.reward)
    return dict(counts)


def cost_bounds() -> list[list[str | int]]:
    """COST's bounds for the scripts: [as spelled, pico-dollars], rising."""
    return [[bound, int(Decimal(bound) * COST.units)] for bound in COST.bounds]


def distribution(counters: Mapping[str, str], histogram: Histogram, label: str = "") -> Distribution:
    """One histogram out of the counters."""
    prefix = f"{histogram.key}:{label}:le:" if label else f"{histogram.key}:le:"
    fell = {name.removeprefix(prefix): int(count) for name, count in counters.items() if name.startswith(prefix)}
    buckets = [
        (bound, sum(count for old, count in fell.items() if old != INFINITE and Decimal(old) <= Decimal(bound)))
        for bound in histogram.bounds
    ]
    total = counters.get(prefix.removesuffix("le:") + "sum", "0")
    return Distribution((*buckets, (INFINITE, sum(fell.values()))), Decimal(total) / histogram.units)


def _observe(counts: Counter[str], histogram: Histogram, value: float, *, label: str = "") -> None:
    amount = int((Decimal(repr(value)) * histogram.units).to_integral_value())
    prefix = f"{histogram.key}:{label}" if label else histogram.key
    counts[f"{prefix}:le:{histogram.under(amount)}"] += 1
    counts[f"{prefix}:sum"] += amount


def _result(step: Operation, *, scored: bool) -> str:
    """How a tool call went: an episode with a score lost nothing, whatever its policy got wrong."""
    if step.timed_out:
        return "timed_out"
    if not step.ok:
        return "failed" if scored else "lost"
    return "failed" if step.exit_code else "ok"
