"""The failure limit: when a run has to stop, and what it says then."""

from __future__ import annotations

import pytest

from orchestrator.errors import (
    CapacityError,
    EpisodeAborted,
    FarmError,
    ReceiptOverdue,
    RedisUnavailable,
    SettingsError,
)
from orchestrator.tasks import TaskError
from orchestrator.vocabulary import Outcome
from trainer.session_failures import FailureLimit, SessionTally, TooManyFailures, Verdict, cause_of, judge

LOST: Verdict = ("sandbox_lost", "the sandbox died")
LIMIT = FailureLimit(rate=0.25, window=8, minimum=4)


@pytest.mark.parametrize(
    ("ended", "stops"),
    [
        ([LOST, LOST, LOST], False),  # too few to judge
        ([LOST, None, None, None], False),  # exactly the limit
        ([LOST, LOST, None, None], True),
        ([LOST, LOST, LOST, *[None] * 8], False),  # long ago
        ([*[None] * 100, LOST, LOST, LOST], True),  # lately
    ],
)
def test_a_run_stops_above_its_limit_only(ended: list[Verdict], stops: bool) -> None:
    assert (judge(ended, LIMIT) is not None) is stops


def test_a_rate_of_one_never_stops_and_a_rate_of_zero_at_the_first_failure() -> None:
    assert judge([LOST] * 40, FailureLimit(rate=1.0)) is None
    assert judge([*[None] * 39, LOST], FailureLimit(rate=0.0)) is not None


def test_the_verdict_names_the_counts_and_the_most_frequent_cause() -> None:
    verdict = judge([LOST, ("transport", "no answer"), ("sandbox_lost", "it died again"), None, None], LIMIT)
    assert verdict == (
        "3 of the last 5 sessions failed (60%, limit 25%); most frequent cause: sandbox_lost, 2 times, the last with: "
        "it died again; also transport 1"
    )


@pytest.mark.parametrize("wrong", [{"rate": -0.1}, {"rate": 1.1}, {"minimum": 0}, {"minimum": 9, "window": 8}])
def test_a_limit_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="failure"):
        FailureLimit(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (EpisodeAborted(Outcome.SETUP_FAILED, "no such template"), "setup_failed"),
        (RedisUnavailable("gone"), "redis_unavailable"),
        (CapacityError("none"), "no_worker"),
        (TaskError(["none"]), "task"),
        (ReceiptOverdue("late"), "no_receipt"),
        (FarmError("what"), "other"),
    ],
)
def test_a_cause_is_the_kind_of_its_error(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause


def test_once_too_many_have_failed_it_stays_so() -> None:
    tally = SessionTally(FailureLimit(rate=0.5, window=4, minimum=2))
    for _ in range(2):
        tally.opened()
        tally.require_few()
        tally.failed(RedisUnavailable("gone"))
    for _ in range(20):
        tally.opened()
        tally.scored()
    with pytest.raises(TooManyFailures, match=r"2 of the last 2 sessions failed .* In all: 20 scored, 2 failed, 0"):
        tally.require_few()
    assert not issubclass(TooManyFailures, Exception), "a harness would take it for one bad rollout"
    assert (tally.counts().open, tally.counts().causes) == (0, {"redis_unavailable": 2})


def tally_of(window: int, *, rate: float = 0.25) -> SessionTally:
    return SessionTally(FailureLimit(rate=rate, window=window, minimum=window))


def test_a_window_of_sessions_closed_unfinished_stops_the_run() -> None:
    tally = tally_of(3)
    for _ in range(2):
        tally.abandoned(by_harness=True)
    tally.require_few()
    tally.abandoned(by_harness=True)
    with pytest.raises(TooManyFailures, match=r"3 sessions in a row were closed unfinished: .* see its log\. In all: "):
        tally.require_few()


@pytest.mark.parametrize("ended", ["scored", "failed"])
def test_a_session_that_ended_otherwise_breaks_the_row(ended: str) -> None:
    tally = tally_of(3)
    for _ in range(2):
        for _ in range(2):
            tally.abandoned(by_harness=True)
        tally.scored() if ended == "scored" else tally.failed(RedisUnavailable("gone"))
        tally.require_few()


def test_sessions_that_a_closing_factory_ends_are_in_no_row_and_a_rate_of_one_never_stops() -> None:
    closing, never = tally_of(3), tally_of(3, rate=1.0)
    for _ in range(9):
        closing.abandoned(by_harness=False)
        never.abandoned(by_harness=True)
        closing.require_few()
        never.require_few()
