"""How ended episodes are counted into the charts' stretches of time, and what the charts make of numbers."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.dashboard import charts
from orchestrator.dashboard.history import BUCKETS, RING, Ended, gap_before, nearest_rank, series, window_of
from orchestrator.dashboard.wording import counted, dollars, dollars_short, seconds, size
from orchestrator.vocabulary import Outcome

NOW = 1_000_000.0


def ended(ago: float, outcome: Outcome = Outcome.SOLVED, *, ran: float = 1.0, **changes: Any) -> Ended:
    given: dict[str, Any] = {
        "episode_id": f"e-{ago}",
        "run_id": "run-1",
        "task_id": "t",
        "outcome": outcome,
        "reward": outcome.score,
        "detail": "",
        "queued_at": NOW - ago - ran,
        "started_at": NOW - ago - ran,
        "finished_at": NOW - ago,
        "phases": {"policy": ran},
        "cost_picousd": 5,
    }
    return Ended(**{**given, **changes})


def test_each_episode_is_counted_once_in_the_stretch_in_which_it_ended() -> None:
    found = series(
        [ended(1), ended(2, Outcome.WRONG_ANSWER), ended(12, Outcome.WORKER_LOST), ended(299.5), ended(301)],
        (),
        NOW,
        300,
    )
    last, before, first = found.buckets[-1], found.buckets[-3], found.buckets[0]
    assert (last.solved, last.unsolved, last.aborted, last.mean_reward) == (1, 1, 0, 0.5)
    assert (before.aborted, before.mean_reward) == (1, None)
    assert first.solved == 1
    assert sum(bucket.solved + bucket.unsolved + bucket.aborted for bucket in found.buckets) == 4
    assert sum(bucket.cost_picousd for bucket in found.buckets) == 20
    assert last.mean_phase("policy") == 1.0
    assert last.mean_phase("verify") == 0.0


def test_running_episodes_are_averaged_over_each_stretch() -> None:
    found = series([ended(10, ran=20)], [NOW - 7.5], NOW, 300)  # stretches of five seconds
    assert [bucket.running for bucket in found.buckets[-7:]] == pytest.approx([0, 1, 1, 1, 1, 0.5, 1])


def test_an_episode_longer_than_the_window_fills_it_and_one_from_the_future_breaks_nothing() -> None:
    found = series([ended(-3, ran=10_000)], [NOW + 5], NOW, 300)
    assert [bucket.running for bucket in found.buckets] == pytest.approx([1.0] * BUCKETS)
    assert found.buckets[-1].solved == 1


def test_the_window_follows_the_newest_hundred_episodes() -> None:
    assert window_of([], NOW) == 300
    assert window_of([ended(10)], NOW) == 300
    assert window_of([ended(10), ended(1000)], NOW) == 3600
    assert window_of([ended(1 + number / 10) for number in range(100)] + [ended(80_000)], NOW) == 300
    assert window_of([ended(10), ended(200_000)], NOW) == 300, "older than the longest window: not shown anyway"


def test_a_full_ring_says_from_when_on_the_charts_are_whole() -> None:
    full = [ended(number * 20) for number in range(RING)]  # eleven hours
    assert gap_before(full, NOW, 86_400) == full[-1].finished_at
    assert gap_before(full, NOW, 21_600) is None
    assert gap_before(full[:-1], NOW, 86_400) is None, "nothing was dropped yet"
    assert gap_before([], NOW, 86_400) is None


def test_quantiles_are_values_that_occurred() -> None:
    assert [nearest_rank([3, 1, 2], share) for share in (0.0, 0.5, 0.95)] == [1, 2, 3]
    assert nearest_rank([1, 2, 3, 4], 0.5) == 2
    assert nearest_rank(range(1, 21), 0.95) == 19


@pytest.mark.parametrize(("value", "top"), [(0, 1), (0.3, 0.3), (3.2, 4), (7, 8), (11, 12), (99, 100), (2000, 2000)])
def test_an_axis_ends_at_a_round_number_that_holds_the_value(value: float, top: float) -> None:
    assert charts.nice(value) == pytest.approx(top)


def test_a_chart_draws_inside_its_frame_and_shows_a_limit_that_is_near() -> None:
    near = charts.area([1, 2, 3], css="c", limit=4, limit_text="limit 4", window="5 min", label=str)
    far = charts.area([1, 2, 3], css="c", limit=400, limit_text="limit 400", window="5 min", label=str)
    assert "limit 4<" in near
    assert "limit 400" not in far
    bars = charts.stacked([("a", [0, 2]), ("b", [0, 1])], window="1 h", label=str)
    assert bars.count("<rect") == 2
    assert charts.line([None, 0.5, None], css="c", top=1.0, window="1 h", label=str).count("<circle") == 1


def test_numbers_read_with_units() -> None:
    assert [dollars(n) for n in (0, 345 * 10**6, 5 * 10**10, 25 * 10**11)] == ["$0", "$0.000345", "$0.0500", "$2.50"]
    assert dollars_short(4 * 10**8) == "$0.0004"
    assert [seconds(n) for n in (0.05, 3.21, 75, 3700)] == ["50 ms", "3.2 s", "1 min 15 s", "1 h 01 min"]
    assert [size(n) for n in (12, 2048)] == ["12 B", "2.0 KiB"]
    assert [counted(n, "worker") for n in (1, 1200)] == ["1 worker", "1,200 workers"]
