"""The benchmarks' arithmetic: goals, ratios, covered time."""

from __future__ import annotations

import math

from tests.bench.creation_ceiling import Tally
from tests.bench.episode_overhead import union_seconds
from tests.bench.permits import most_at_once, overtaken
from tests.bench.rows import Goal, Row, table


def test_a_limit_itself_meets_its_goal_and_nan_never_does() -> None:
    assert Goal("<=", 40).met_by(40)
    assert not Goal("<=", 40).met_by(40.001)
    assert Goal(">=", 14).met_by(14)
    assert not Goal(">=", 14).met_by(13.9)
    assert not Goal("<=", 40).met_by(math.nan)
    assert not Goal(">=", 14).met_by(math.nan)


def test_a_row_without_a_goal_has_no_verdict() -> None:
    row = Row("a part", 3.0, "ms", None, "measured")
    assert row.met is None
    assert row.as_json()["goal"] is None


def test_the_table_says_which_goals_are_missed() -> None:
    lines = table([Row("a", 30, "ms", Goal("<=", 40), ""), Row("b", 50, "ms", Goal("<=", 40), "")]).splitlines()
    assert lines[1].rstrip().endswith("yes")
    assert lines[2].split() == ["b", "50.00", "ms", "<=", "40", "1.25", "NO"]


def test_overlapping_calls_are_counted_once() -> None:
    assert union_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0
    assert union_seconds([]) == 0.0


def test_a_permit_given_clearly_before_an_earlier_request_counts_as_out_of_order() -> None:
    in_order = [(0.0, 1.0), (0.1, 1.1), (0.2, 1.2)]
    assert overtaken(in_order, slack_seconds=0.005) == 0
    assert overtaken([*in_order, (0.3, 0.9)], slack_seconds=0.005) == 1
    assert overtaken([(0.0, 1.0), (0.001, 0.9)], slack_seconds=0.005) == 0, "asked at the same time"


def test_permits_are_held_at_once_when_their_stretches_share_a_moment() -> None:
    assert most_at_once([(0, 3), (1, 2), (2, 5)]) == 2
    assert most_at_once([(0, 3), (1, 4), (2, 5)]) == 3
    assert most_at_once([]) == 0


def test_the_ceiling_counts_the_burst_that_a_provider_begins_with() -> None:
    assert Tally(created=65, refused=0, highest=1, seconds=12, rate=5, burst=5).share == 100
