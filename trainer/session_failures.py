"""Failures of sessions: counted by cause, judged against a limit, and turned into the end of the run above it.

What always holds: a session is counted once, as scored, failed or abandoned; a failed one has no score anywhere; once
the share of failures was above the limit, or a whole window of sessions in a row was closed unfinished, every further
session is refused with the same text.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import CapacityError, EpisodeAborted, ReceiptOverdue, RedisUnavailable, SettingsError
from orchestrator.tasks import TaskError

Verdict = tuple[str, str] | None
"""How a session ended: None when it was scored, else (cause, detail) of its failure."""


_MEND_FARM = (
    "Look at `rollout-farm status` and `rollout-farm doctor`, mend the cause and start again, or allow more with "
    "FailureLimit(rate=...)"
)
_MEND_HARNESS = "Mend that and start again, or allow more in a row with FailureLimit(window=...)"


class TooManyFailures(BaseException):
    """More sessions failed or were left unfinished than the limit allows: the run has to stop.

    Its data would be whatever is left.

    Not an Exception, on purpose: harness loops take every Exception of a session for one bad rollout and go on (TRL's
    with a line in its log, OpenEnv's collector with a count). This leaves both at once.
    """


@dataclass(frozen=True)
class FailureLimit:
    """Stop when more than `rate` of the last `window` sessions failed, once `minimum` have ended; 1.0 never stops.

    Also when `window` sessions in a row were closed before they were verified: what drives them fails, and harnesses
    only log that.
    """

    rate: float = 0.25
    window: int = 40
    minimum: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise SettingsError(f"a failure rate lies within 0 and 1, got {self.rate}; 0.25 allows one in four")
        if not 1 <= self.minimum <= self.window:
            raise SettingsError(
                f"a failure limit needs 1 <= minimum <= window, got minimum {self.minimum} and window {self.window}"
            )


@dataclass(frozen=True)
class SessionCounts:
    """How the sessions of one factory stand."""

    open: int
    scored: int
    failed: int
    abandoned: int
    """Closed before they were verified, such as those that were running when the trainer stopped."""
    unclosed: int
    """Whose end could not be asked for; the farm ends them when the heartbeat stops."""
    causes: Mapping[str, int]
    """Failures by cause: an outcome, or one of redis_unavailable, no_worker, no_receipt, task and other."""


def cause_of(error: Exception) -> str:
    """The cause that a failure is counted under."""
    if isinstance(error, EpisodeAborted):
        return str(error.outcome)
    if isinstance(error, RedisUnavailable):
        return "redis_unavailable"
    if isinstance(error, CapacityError):
        return "no_worker"
    if isinstance(error, ReceiptOverdue):
        return "no_receipt"
    return "task" if isinstance(error, TaskError) else "other"


def judge(ended: Sequence[Verdict], limit: FailureLimit) -> str | None:
    """Why the run has to stop, given how the last sessions ended, oldest first; None while it may go on."""
    recent = list(ended)[-limit.window :]
    failures = [verdict for verdict in recent if verdict is not None]
    if len(recent) < limit.minimum or len(failures) <= limit.rate * len(recent):
        return None
    causes = Counter(cause for cause, _ in failures)
    frequent, times = causes.most_common(1)[0]
    detail = next(text for cause, text in reversed(failures) if cause == frequent)
    others = ", ".join(f"{cause} {count}" for cause, count in causes.most_common()[1:])
    return (
        f"{len(failures)} of the last {len(recent)} sessions failed ({len(failures) / len(recent):.0%}, limit "
        f"{limit.rate:.0%}); most frequent cause: {frequent}, {times} times, the last with: {detail}"
        + (f"; also {others}" if others else "")
    )


def judge_unfinished(in_a_row: int, limit: FailureLimit) -> str | None:
    """Why the run has to stop, given how many sessions in a row were closed unfinished; None while it may go on."""
    if in_a_row < limit.window or limit.rate == 1:
        return None
    return f"{in_a_row} sessions in a row were closed unfinished: the harness or model server fails; see its log"


class SessionTally:
    """Counts sessions; safe to use from the threads of all of them."""

    def __init__(self, limit: FailureLimit) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._recent: deque[Verdict] = deque(maxlen=limit.window)
        self._causes: Counter[str] = Counter()
        self._opened = self._scored = self._abandoned = self._unclosed = 0
        self._unfinished = 0
        """In a row."""
        self._verdict: str | None = None
        self._advice = ""

    def opened(self) -> None:
        """A session was asked for."""
        with self._lock:
            self._opened += 1

    def scored(self) -> None:
        """A session has its reward."""
        with self._lock:
            self._scored += 1
            self._unfinished = 0
            self._recent.append(None)

    def failed(self, error: Exception) -> None:
        """A session failed."""
        with self._lock:
            cause = cause_of(error)
            self._causes[cause] += 1
            self._unfinished = 0
            self._recent.append((cause, str(error)))
            self._conclude(judge(tuple(self._recent), self._limit), _MEND_FARM)

    def abandoned(self, *, by_harness: bool) -> None:
        """A session was closed before it was verified: by what drives it, or because the factory closes."""
        with self._lock:
            self._abandoned += 1
            if by_harness:
                self._unfinished += 1
                self._conclude(judge_unfinished(self._unfinished, self._limit), _MEND_HARNESS)

    def unclosed(self) -> None:
        """A session's end could not be asked for."""
        with self._lock:
            self._unclosed += 1

    def counts(self) -> SessionCounts:
        """As they stand."""
        with self._lock:
            failed = self._causes.total()
            ended = self._scored + failed + self._abandoned
            return SessionCounts(
                open=self._opened - ended,
                scored=self._scored,
                failed=failed,
                abandoned=self._abandoned,
                unclosed=self._unclosed,
                causes=dict(self._causes),
            )

    def require_few(self) -> None:
        """Raise TooManyFailures when the share of failures, or of sessions left unfinished, was above the limit."""
        if self._verdict is not None:
            counts = self.counts()
            raise TooManyFailures(
                f"{self._verdict}. In all: {counts.scored} scored, {counts.failed} failed, {counts.abandoned} "
                f"abandoned. A failed session has no score. {self._advice}"
            )

    def _conclude(self, verdict: str | None, advice: str) -> None:
        """The first verdict stays."""
        if self._verdict is None and verdict is not None:
            self._verdict, self._advice = verdict, advice
