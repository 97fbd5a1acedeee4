"""The statistics of evaluations: pass@k, quantiles and bootstrap intervals. Pure functions of numbers.

What always holds: the same numbers give the same answer, intervals included: the bootstrap draws from a generator
of its own with a fixed seed. Tasks are what is drawn, so an interval says how far the result may be from that of
other tasks like these; with fewer than two tasks there is none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
RESAMPLES = 10_000
"""The quantiles of that many means move by about 0.002 standard deviations of a value between seeds."""

_SEED = 0


@dataclass(frozen=True)
class Interval:
    """A two-sided interval at `confidence`."""

    low: float
    high: float
    confidence: float = CONFIDENCE


@dataclass(frozen=True)
class Spread:
    """A sample in four numbers, in the sample's unit."""

    count: int
    mean: float
    median: float
    p95: float


def pass_at_k(episodes: int, solved: int, k: int) -> float:
    """The chance that at least one of k episodes solves the task, estimated from `solved` of `episodes`; unbiased.

    1 - C(n-c, k) / C(n, k), as in Chen et al. 2021 (arXiv:2107.03374). Raises ValueError unless 1 <= k <= episodes and
    0 <= solved <= episodes.
    """
    if not 1 <= k <= episodes or not 0 <= solved <= episodes:
        raise ValueError(f"pass@{k} of {solved} solved in {episodes} episodes is not defined")
    return 1 - math.comb(episodes - solved, k) / math.comb(episodes, k)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; raises ValueError when there is nothing to average."""
    if not values:
        raise ValueError("the mean of nothing is not defined")
    return math.fsum(values) / len(values)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sample lies, between neighbours linearly; raises ValueError for no value."""
    if not values or not 0 <= share <= 1:
        raise ValueError(f"quantile {share} of {len(values)} values is not defined")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, median and 95 % quantile; None for no value."""
    if not values:
        return None
    return Spread(len(values), mean(values), quantile(values, 0.5), quantile(values, 0.95))


def bootstrap_mean(
    values: Sequence[float], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Interval | None:
    """The percentile bootstrap interval of the mean; `values` has one number a task. None for fewer than two."""
    if len(values) < 2:
        return None
    generator = random.Random(_SEED)
    count = len(values)
    means = [math.fsum(generator.choices(values, k=count)) / count for _ in range(resamples)]
    tail = (1 - confidence) / 2
    return Interval(quantile(means, tail), quantile(means, 1 - tail), confidence)


def paired_differences(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """after - before, task by task; raises ValueError when the two do not pair up."""
    return [later - earlier for earlier, later in zip(before, after, strict=True)]
