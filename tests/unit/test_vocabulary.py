"""The words of the farm and what always holds between them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.vocabulary import (
    TRANSITIONS,
    AllocationState,
    Outcome,
    Role,
    allocation_id,
    job_id,
)

SCORED = {"solved", "wrong_answer", "candidate_failed", "artifact_missing", "not_submitted", "window_exhausted"}
ABORTED = {
    "sandbox_lost",
    "transport",
    "deadline",
    "setup_failed",
    "cleanup_unresolved",
    "worker_lost",
    "trainer_lost",
    "cancelled",
    "admission_timeout",
    "budget_exhausted",
}


def test_outcomes_are_those_of_the_design() -> None:
    assert {outcome.value for outcome in Outcome} == SCORED | ABORTED


@pytest.mark.parametrize("outcome", Outcome)
def test_only_scored_outcomes_carry_a_score(outcome: Outcome) -> None:
    assert outcome.scored == (outcome.value in SCORED)
    assert (outcome.score is None) == (not outcome.scored)
    if outcome.scored:
        assert outcome.score == (1.0 if outcome is Outcome.SOLVED else 0.0)


def test_every_state_has_a_row_in_the_table() -> None:
    assert set(TRANSITIONS) == set(AllocationState)


def test_every_allocation_can_be_settled_and_stays_so() -> None:
    for state in AllocationState:
        reachable, edge = {state}, {state}
        while edge:
            edge = {following for origin in edge for following in TRANSITIONS[origin]} - reachable
            reachable |= edge
        assert any(end.settled for end in reachable)
        if state.settled:
            assert reachable == {state}


def test_nothing_becomes_an_intent_again_and_what_was_created_is_never_called_refused() -> None:
    assert not any(AllocationState.INTENDED in following for following in TRANSITIONS.values())
    for state in (AllocationState.CREATED, AllocationState.UNRESOLVED):
        assert AllocationState.REFUSED not in TRANSITIONS[state]


@given(st.integers(min_value=1, max_value=9999), st.sampled_from(Role))
def test_the_longest_episode_still_names_its_allocations(attempt: int, role: Role) -> None:
    name = allocation_id("e" * 48, attempt, role)
    assert re.fullmatch(r"[a-z0-9-]{1,64}", name)
    assert name.startswith(job_id("e" * 48, attempt) + "-")
