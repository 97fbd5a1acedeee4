"""The chaos suite can fail: each invariant names what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.records import Allocation, Receipt, SettledReceipt
from orchestrator.vocabulary import AllocationState, Drive, Outcome, Role
from tests.chaos.invariants import Reading, shows_nothing, violations

_ABSENT = Allocation(
    allocation_id="e-1-a1-policy",
    episode_id="e-1",
    role=Role.POLICY,
    state=AllocationState.ABSENT,
    sandbox_id="s1",
    intended_at=1,
    created_at=2,
    absent_at=8,
    running_seconds=6,
    cost_picousd=60,
)

_VERIFIER = _ABSENT.model_copy(
    update={"allocation_id": "e-1-a1-verifier", "role": Role.VERIFIER, "sandbox_id": "s2", "cost_picousd": 20}
)
_COUNTERS = {
    "episodes:solved": 1,
    "cost_picousd:policy": 60,
    "cost_picousd:verifier": 20,
    "sandbox_ms:policy": 6000,
    "sandbox_ms:verifier": 6000,
    "reward:le:1": 1,
    "reward:sum": 1_000_000,
    "episode_cost:sum": 80,
}


def settled(outcome: Outcome, reward: float | None, *rows: Allocation) -> SettledReceipt:
    """The receipt of e-1."""
    receipt = Receipt(
        episode_id="e-1",
        attempt=1,
        run_id="run",
        task_id="task",
        task_digest="0",
        template="base",
        drive=Drive.REMOTE,
        outcome=outcome,
        reward=reward,
        queued_at=0,
        finished_at=9,
        allocations=tuple(row.allocation_id for row in rows),
    )
    return SettledReceipt(receipt=receipt, allocations=rows)


CLEAN = Reading(
    expected={"e-1": 1.0},
    told={"e-1": 1.0},
    receipts={"e-1": settled(Outcome.SOLVED, 1.0, _ABSENT, _VERIFIER)},
    written_at={"e-1": 9},
    announced=["e-1"],
    counters=_COUNTERS,
    metrics=[],
    leftovers={"sandboxes": []},
)


def test_a_clean_round_has_no_violations() -> None:
    assert violations(CLEAN) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda r: replace(r, receipts={}, counters={}), "e-1 has no receipt"),
        (lambda r: replace(r, announced=["e-1", "e-1"]), "announced 2 times"),
        (lambda r: replace(r, expected={}, announced=[]), "never submitted"),
        (lambda r: replace(r, expected={"e-1": 0.0}), "its policy earns 0.0"),
        (lambda r: replace(r, told={"e-1": 0.0}), "the trainer was told 0.0"),
        (lambda r: replace(r, written_at={"e-1": 7}), "has a score and e-1-a1-policy"),
        (
            lambda r: replace(r, counters={**r.counters, "cost_picousd:policy": 59}),
            "counter cost_picousd:policy says 59",
        ),
        (lambda r: replace(r, counters={**r.counters, "episodes:deadline": 1}), "counter episodes:deadline says 1"),
        (
            lambda r: replace(r, receipts={"e-1": settled(Outcome.SOLVED, 1.0, _ABSENT)}),
            "e-1 ended solved, its absent sandboxes",
        ),
        (
            lambda r: replace(r, receipts={"e-1": settled(Outcome.SOLVED, 1.0, _VERIFIER, _VERIFIER)}),
            "e-1 ended solved, its absent sandboxes",
        ),
        (lambda r: replace(r, metrics=["farm_workers says 2"]), "farm_workers says 2"),
        (lambda r: replace(r, counters={**r.counters, "phase:setup:sum": 1}), "counter phase:setup:sum says 1"),
        (lambda r: replace(r, counters={**r.counters, "reward:sum": 0}), "counter reward:sum says 0, the receipts 1"),
        (lambda r: replace(r, leftovers={"leases": ["e-1"]}), "left: leases: e-1"),
        (
            lambda r: replace(
                r,
                receipts={
                    "e-1": settled(
                        Outcome.SOLVED, 1.0, _ABSENT.model_copy(update={"state": AllocationState.UNRESOLVED})
                    )
                },
            ),
            "is still unresolved",
        ),
    ],
)
def test_each_violation_is_said(spoil: Callable[[Reading], Reading], said: str) -> None:
    found = violations(spoil(CLEAN))
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(("seconds", "said"), [(59.9, 1), (60.0, 0)])
def test_a_window_that_ends_before_its_time_is_said(seconds: float, said: int) -> None:
    end = settled(Outcome.WINDOW_EXHAUSTED, 0.0, _ABSENT)
    end = end.model_copy(update={"receipt": end.receipt.model_copy(update={"phases": {"policy": seconds}})})
    found = violations(replace(CLEAN, receipts={"e-1": end}, told={}))
    assert sum("scored 0.0 (window_exhausted), its policy earns 1.0" in problem for problem in found) == said


def test_a_round_in_which_something_was_solved_and_everything_was_struck_shows_what_it_says() -> None:
    assert shows_nothing({"solved": 1, "worker_lost": 199}, {"slot": 1, "redis": 2}, ["slot", "redis"]) == []


@pytest.mark.parametrize("outcomes", [{}, {"solved": 0, "worker_lost": 200}, {"window_exhausted": 7}])
def test_a_round_in_which_nothing_was_solved_fails(outcomes: dict[str, int]) -> None:
    [said] = shows_nothing(outcomes, {"slot": 1}, ["slot"])
    assert said.startswith("no episode was solved (")
    assert all(outcome in said for outcome in outcomes)


def test_each_kind_of_blow_that_was_planned_and_never_fell_is_said() -> None:
    found = shows_nothing({"solved": 1}, {"slot": 3, "redis": 0}, ["slot", "redis", "horse"])
    assert [problem.split(":")[0] for problem in found] == ["no blow ever fell on redis", "no blow ever fell on horse"]
