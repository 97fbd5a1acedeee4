"""The service's log against the ledger: each contradiction is said, and a log that began anew is another life."""

from __future__ import annotations

import pytest

from orchestrator.records import Allocation
from orchestrator.vocabulary import AllocationState, Role
from tests.chaos.service_log import Event, Life, contradictions, joined


def event(kind: str, sandbox: str, time: float, live: int = 1) -> Event:
    return {"event": kind, "sandbox_id": sandbox, "time": time, "live": live, "metadata": {}}


def row(sandbox: str, absent_at: float | None, state: AllocationState = AllocationState.ABSENT) -> Allocation:
    return Allocation(
        allocation_id=f"e-{sandbox}-a1-policy",
        episode_id=f"e-{sandbox}",
        role=Role.POLICY,
        state=state,
        sandbox_id=sandbox,
        intended_at=1,
        absent_at=absent_at,
    )


BORN, GONE = event("created", "s1", 10), event("deleted", "s1", 20, live=0)


def test_a_log_that_goes_on_is_the_same_life_and_one_that_does_not_is_another() -> None:
    lives = joined([], [], 1)
    lives = joined(lives, [BORN], 11)
    lives = joined(lives, [BORN, GONE], 21)
    assert lives == [Life([BORN, GONE], 21)]
    lives = joined(lives, [], 30)
    assert lives == [Life([BORN, GONE], 21), Life([], 30)]
    assert joined(lives, [event("created", "s2", 31)], 32)[1:] == [Life([event("created", "s2", 31)], 32)]


def test_a_ledger_that_agrees_is_not_contradicted() -> None:
    assert contradictions([Life([BORN, GONE], 30)], [row("s1", 20.1)], limit=1) == []


def test_a_sandbox_that_died_with_the_service_is_absent_after_that() -> None:
    killed = [Life([BORN], 15), Life([], 30)]
    assert contradictions(killed, [row("s1", 15.1)], limit=1) == []
    assert contradictions(killed, [], limit=1) == [], "a creation that nobody heard of ended with the service"
    assert "until 15" in contradictions(killed, [row("s1", 14)], limit=1)[0]


def test_an_orphan_is_named_by_no_row_and_was_deleted() -> None:
    assert contradictions([Life([BORN, GONE], 30)], [], limit=1) == []


@pytest.mark.parametrize(
    ("events", "rows", "said"),
    [
        ([BORN, GONE], [row("s1", 19)], "absent since 19.0, the service had s1 until 20"),
        ([BORN, GONE], [row("s1", None, AllocationState.UNRESOLVED)], "has ended, its row is unresolved"),
        ([BORN], [row("s1", 19)], "still runs, its row is absent"),
        ([BORN], [], "still runs, and no row names it"),
        ([BORN, event("expired", "s1", 20, live=0)], [], "was expired, and no row names it"),
        (
            [BORN, event("created", "s2", 11, live=2), GONE, event("deleted", "s2", 20, live=0)],
            [],
            "2 sandboxes at once under a limit of 1",
        ),
    ],
)
def test_each_contradiction_is_said(events: list[Event], rows: list[Allocation], said: str) -> None:
    (problem,) = contradictions([Life(events, 30)], rows, limit=1)
    assert said in problem
