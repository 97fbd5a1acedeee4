"""An episode's clocks, with time as a value."""

from __future__ import annotations

from contextlib import suppress

import pytest

from orchestrator.errors import EpisodeAborted
from orchestrator.vocabulary import Outcome, Phase
from workers.timeline import Timeline


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(clock: Clock) -> Timeline:
    return Timeline(deadline_seconds=600, window_seconds=120, clock=clock)


def test_waiting_before_the_start_costs_no_deadline(timeline: Timeline, clock: Clock) -> None:
    clock.now += 5000
    assert timeline.left() == 600
    timeline.start()
    clock.now += 599
    assert timeline.left() == 1


def test_the_window_runs_from_its_opening(timeline: Timeline, clock: Clock) -> None:
    timeline.start()
    clock.now += 300
    assert timeline.window_left() == 120
    timeline.open_window()
    clock.now += 121
    assert timeline.window_left() == -1


def test_a_bound_is_the_shorter_of_a_limit_and_what_is_left(timeline: Timeline, clock: Clock) -> None:
    timeline.start()
    assert timeline.bound(10) == 10
    clock.now += 595
    assert timeline.bound(10) == 5


@pytest.mark.parametrize("late", [0, 0.001, 1000])
def test_a_bound_past_the_deadline_aborts(timeline: Timeline, clock: Clock, late: float) -> None:
    timeline.start()
    clock.now += 600 + late
    with pytest.raises(EpisodeAborted) as caught:
        timeline.bound(10)
    assert caught.value.outcome is Outcome.DEADLINE
    assert "600 s" in caught.value.detail


def test_the_policy_phase_ends_at_the_first_closing(timeline: Timeline, clock: Clock) -> None:
    timeline.open_window()
    clock.now += 7
    timeline.close_window()
    clock.now += 50
    timeline.close_window()
    assert timeline.seconds == {Phase.POLICY: 7}


def test_a_window_that_never_opened_leaves_no_policy_phase(timeline: Timeline) -> None:
    timeline.close_window()
    assert timeline.seconds == {}


def test_a_phase_adds_up_and_counts_what_failed_too(timeline: Timeline, clock: Clock) -> None:
    with timeline.timed(Phase.CLEANUP):
        clock.now += 2
    with suppress(ValueError), timeline.timed(Phase.CLEANUP):
        clock.now += 3
        raise ValueError("broken")
    timeline.note(Phase.CLEANUP, 1)
    assert timeline.seconds == {Phase.CLEANUP: 6}
