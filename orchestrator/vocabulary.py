"""The words of the farm and the transitions between them. Owns no data; everything else uses these and no others."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

SCHEMA_VERSION: Literal[1] = 1
"""Version of jobs, rows and receipts; a reader refuses a newer one."""

SLOTS_PER_WORKER = 2
"""Episodes that one worker runs at a time: the sessions of its Terminus server."""


class Role(StrEnum):
    """What a sandbox is for."""

    POLICY = "policy"
    VERIFIER = "verifier"


class Drive(StrEnum):
    """Who decides the actions: a script in the job, or a trainer through the mailbox."""

    AUTONOMOUS = "autonomous"
    REMOTE = "remote"


class Outcome(StrEnum):
    """How an episode ended. The first six carry a score, the others never do."""

    SOLVED = "solved"
    WRONG_ANSWER = "wrong_answer"
    CANDIDATE_FAILED = "candidate_failed"
    ARTIFACT_MISSING = "artifact_missing"
    NOT_SUBMITTED = "not_submitted"
    WINDOW_EXHAUSTED = "window_exhausted"
    SANDBOX_LOST = "sandbox_lost"
    TRANSPORT = "transport"
    DEADLINE = "deadline"
    SETUP_FAILED = "setup_failed"
    CLEANUP_UNRESOLVED = "cleanup_unresolved"
    WORKER_LOST = "worker_lost"
    TRAINER_LOST = "trainer_lost"
    CANCELLED = "cancelled"
    ADMISSION_TIMEOUT = "admission_timeout"
    BUDGET_EXHAUSTED = "budget_exhausted"

    @property
    def scored(self) -> bool:
        """Whether this outcome carries a reward."""
        return self in _SCORES

    @property
    def score(self) -> float | None:
        """The reward of this outcome, in [0, 1]; None for an aborted episode."""
        return _SCORES.get(self)


_SCORES = {
    Outcome.SOLVED: 1.0,
    Outcome.WRONG_ANSWER: 0.0,
    Outcome.CANDIDATE_FAILED: 0.0,
    Outcome.ARTIFACT_MISSING: 0.0,
    Outcome.NOT_SUBMITTED: 0.0,
    Outcome.WINDOW_EXHAUSTED: 0.0,
}


class EpisodeState(StrEnum):
    """Where an episode's row stands."""

    QUEUED = "queued"
    RUNNING = "running"
    FINAL = "final"


class AllocationState(StrEnum):
    """Where one sandbox stands, from intent to confirmed absence."""

    INTENDED = "intended"  # written before anything was sent
    CREATED = "created"  # the provider named an id
    UNKNOWN = "unknown"  # the answer was lost: it may exist
    UNRESOLVED = "unresolved"  # deletion could not be confirmed
    ABSENT = "absent"  # deleted and confirmed absent
    REFUSED = "refused"  # the provider allocated nothing
    EXPIRED = "expired"  # its longest possible life is over, and its absence was never confirmed

    @property
    def settled(self) -> bool:
        """Whether nothing of this allocation can still be running."""
        return not TRANSITIONS[self]

    @property
    def accrues(self) -> bool:
        """Whether a sandbox has a name and may be running: then its price grows."""
        return self in (AllocationState.CREATED, AllocationState.UNRESOLVED)

    @property
    def stuck(self) -> bool:
        """Whether its end or its existence could not be confirmed."""
        return self in (AllocationState.UNRESOLVED, AllocationState.UNKNOWN)


TRANSITIONS: dict[AllocationState, frozenset[AllocationState]] = {
    AllocationState.INTENDED: frozenset({AllocationState.CREATED, AllocationState.UNKNOWN, AllocationState.REFUSED}),
    AllocationState.UNKNOWN: frozenset({AllocationState.CREATED, AllocationState.EXPIRED}),
    AllocationState.CREATED: frozenset({AllocationState.ABSENT, AllocationState.UNRESOLVED}),
    AllocationState.UNRESOLVED: frozenset({AllocationState.ABSENT, AllocationState.EXPIRED}),
    AllocationState.ABSENT: frozenset(),
    AllocationState.REFUSED: frozenset(),
    AllocationState.EXPIRED: frozenset(),
}


class Phase(StrEnum):
    """The stretches of an episode that a receipt times, in order."""

    QUEUE = "queue"
    ADMISSION = "admission"
    CREATE = "create"
    SETUP = "setup"
    POLICY = "policy"
    EXPORT = "export"
    VERIFY = "verify"
    CLEANUP = "cleanup"


def job_id(episode_id: str, attempt: int | Literal[""]) -> str:
    """The RQ job of one attempt of an episode; "" for what those of all its attempts begin with."""
    return f"{episode_id}-a{attempt}"


def episode_of_job(job_id: str) -> str:
    """The episode that a job's id names, '' where it is none of ours."""
    episode, _, attempt = job_id.rpartition("-a")
    return episode if attempt.isascii() and attempt.isdigit() else ""


def allocation_id(episode_id: str, attempt: int, role: Role) -> str:
    """One sandbox of one attempt; also the provider's idempotency key."""
    return f"{episode_id}-a{attempt}-{role}"
