"""How many episodes of an evaluation are live at once, and what is said when that is not what was meant."""

from __future__ import annotations

import pytest

from deploy.evaluations import places_of
from orchestrator.limiter import Capacity


def capacity(slots: int, limit: int = 100) -> Capacity:
    """An idle farm."""
    return Capacity(live_slots=slots, concurrency_limit=limit, permits=0, reserved=0)


@pytest.mark.parametrize(
    ("slots", "limit", "batch", "places"), [(8, 100, 16, 8), (64, 100, 16, 16), (64, 3, 16, 3), (0, 100, 64, 32)]
)
def test_by_default_no_more_are_live_than_run_and_are_answered_at_once(
    slots: int, limit: int, batch: int, places: int
) -> None:
    assert places_of(None, batch=batch, capacity=capacity(slots, limit)) == (places, [])


def test_what_is_asked_for_and_fits_is_done_without_a_word() -> None:
    assert places_of(16, batch=16, capacity=capacity(16)) == (16, [])


def test_more_than_the_model_answers_at_once_is_done_and_said_with_the_way_out() -> None:
    places, [note] = places_of(32, batch=16, capacity=capacity(64))
    assert places == 32
    assert note.startswith("--parallel 32 is more than the --batch of 16: ")
    assert "scores 0; add --batch 32, or leave --parallel out" in note


@pytest.mark.parametrize(("slots", "limit"), [(4, 100), (64, 4)])
def test_more_than_the_farm_runs_at_once_is_said_and_is_no_word_about_the_batch(slots: int, limit: int) -> None:
    """Those that wait in the queue have no window yet that could run out."""
    places, [note] = places_of(32, batch=16, capacity=capacity(slots, limit))
    assert places == 32
    assert f"({slots} live slots, limit {limit}): the others wait for their turn" in note


def test_both_are_said() -> None:
    assert len(places_of(64, batch=16, capacity=capacity(32))[1]) == 2
