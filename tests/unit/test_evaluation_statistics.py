"""The statistics of evaluations against known values: by hand, by enumeration, and from exact distributions."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.evaluation.statistics import (
    Interval,
    bootstrap_mean,
    mean,
    paired_differences,
    pass_at_k,
    quantile,
    spread,
)


@pytest.mark.parametrize(
    ("episodes", "solved", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (5, 2, 1, 0.4),
        (5, 2, 3, 0.9),  # 1 - C(3,3) / C(5,3)
        (10, 3, 2, 1 - 21 / 45),
        (4, 1, 4, 1.0),
        (200, 0, 100, 0.0),
        (10_000, 1, 5_000, 0.5),
    ],
)
def test_pass_at_k_has_its_known_values(episodes: int, solved: int, k: int, expected: float) -> None:
    assert pass_at_k(episodes, solved, k) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_solved_one(case: tuple[int, int, int]) -> None:
    episodes, solved, k = case
    draws = list(itertools.combinations([True] * solved + [False] * (episodes - solved), k))
    assert pass_at_k(episodes, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("episodes", "solved", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1), (0, 0, 1)])
def test_pass_at_k_is_refused_where_it_is_not_defined(episodes: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(episodes, solved, k)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_quantiles_are_those_of_the_standard_library(values: list[float]) -> None:
    expected = statistics.quantiles(values, n=20, method="inclusive")
    assert [quantile(values, share / 20) for share in range(1, 20)] == pytest.approx(expected, abs=1e-6)


def test_a_spread_is_four_numbers() -> None:
    found = spread([4.0, 1.0, 2.0, 3.0])
    assert found is not None
    assert (found.count, found.mean, found.median) == (4, 2.5, 2.5)
    assert found.p95 == pytest.approx(3.85)
    assert spread([]) is None


@pytest.mark.parametrize(
    ("ones", "zeros", "expected"),
    [
        (10, 10, (0.3, 0.7)),  # the 2.5 % and 97.5 % quantiles of Binomial(20, 1/2) are 6 and 14
        (1, 1, (0.0, 1.0)),  # each end has a quarter of the draws
        (3, 0, (1.0, 1.0)),
        (90, 10, (0.84, 0.95)),  # Binomial(100, 0.9): 84 and 95
    ],
)
def test_the_bootstrap_interval_has_its_exact_ends(ones: int, zeros: int, expected: tuple[float, float]) -> None:
    interval = bootstrap_mean([1.0] * ones + [0.0] * zeros)
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx(expected)


def test_a_bootstrap_is_repeated_exactly_and_needs_two_values() -> None:
    values = [0.1, 0.7, 0.4, 0.9]
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean([0.5]) is None
    assert bootstrap_mean([]) is None


def test_more_confidence_is_a_wider_interval() -> None:
    values = [number / 10 for number in range(10)]
    usual, wide = bootstrap_mean(values), bootstrap_mean(values, confidence=0.99)
    assert isinstance(usual, Interval)
    assert isinstance(wide, Interval)
    assert wide.low < usual.low < mean(values) < usual.high < wide.high


def test_a_shift_of_every_task_is_found_exactly_however_different_the_tasks_are() -> None:
    before = [0.0, 0.25, 0.5, 0.75]
    found = paired_differences(before, [value + 0.25 for value in before])
    interval = bootstrap_mean(found)
    assert found == [0.25] * 4
    assert interval == Interval(0.25, 0.25)


def test_pairs_have_to_pair_up() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_differences([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="not defined"):
        mean([])
