"""What has to be done about what killed processes left behind, decided from one look at the farm. Pure.

What always holds: no slot, job or trainer is declared lost before its time has run out and Redis has been up for one
lease time; a sandbox is an orphan only when its own row says that it is ours and no open allocation can have made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.provider import SandboxRow
from orchestrator.records import Allocation
from orchestrator.rows import OpenEpisode
from orchestrator.vocabulary import EpisodeState, Outcome

SUSPECT_SECONDS = 10.0
"""A queued row whose job is neither waiting nor leased for this long: the worker that popped it is gone."""


@dataclass(frozen=True)
class Enqueue:
    """Put a queued episode's job (back) on the queue."""

    episode_id: str
    lost_jobs: int = 0
    """How often that was done before, when it was looked at: with more by now, somebody else has done it."""


@dataclass(frozen=True)
class End:
    """End a queued episode: its trainer is gone, its end was asked for, or its batch runs without it."""

    episode_id: str
    outcome: Outcome


@dataclass(frozen=True)
class Finish:
    """Seize a running episode whose lease has run out, settle its sandboxes, write its receipt."""

    episode_id: str


@dataclass(frozen=True)
class Settle:
    """Go on with a sandbox that its episode's receipt could not wait for."""

    allocation_id: str


@dataclass(frozen=True)
class DeleteOrphan:
    """Delete a sandbox that carries our farm's tag and belongs to no open allocation."""

    sandbox_id: str
    allocation_id: str
    """What its tags name, '' when they name none."""


@dataclass(frozen=True)
class Forget:
    """Drop what RQ keeps of a job that a worker took and did not note as ended, though its episode is."""

    job_id: str
    queue: str


Repair = Enqueue | End | Finish | Settle | DeleteOrphan | Forget


@dataclass(frozen=True)
class Snapshot:
    """What the plan is made of; times in seconds of Redis."""

    now: float
    watched_since: float
    """Since when Redis has been up and looked at; leases that ran out while it was away are given one lease time."""
    open: Iterable[OpenEpisode]
    lease_ends: Mapping[str, float]
    suspected_seconds: Mapping[str, float]
    """Job id of a queued row -> for how long it has been neither waiting nor known to have been taken."""
    unsettled: Sequence[Allocation]
    """Read before `open`, so that an episode of these that is not open has ended."""
    apart_seconds: Mapping[str, float] = field(default_factory=dict)
    """Queued episode of a reserved batch -> for how long others of it have been seen to run meanwhile."""
    taken_seconds: Mapping[Forget, float] = field(default_factory=dict)
    """For how long a job that RQ calls taken has been seen without an open row that names it."""
    lost_trainers: frozenset[str] = frozenset()
    """Trainers of open episodes that have sent no heartbeat for their time."""
    farm_tag: str | None = None
    sandboxes: Sequence[SandboxRow] = ()
    """The provider's list, read before all of the above, so that what it names had its intent written by then."""
    kept_orphans: Mapping[str, str] = field(default_factory=dict)
    """Orphans that could not be deleted before: sandbox id -> the allocation that its tags name."""


def plan(view: Snapshot, *, lease_seconds: float) -> list[Repair]:
    """Decide what has to be done now."""
    trusted = view.now - view.watched_since >= lease_seconds
    actions: list[Repair] = []
    open_episodes = set()
    for row in view.open:
        open_episodes.add(row.episode_id)
        if (action := _about(row, view, trusted=trusted)) is not None:
            actions.append(action)
    actions += [Settle(row.allocation_id) for row in view.unsettled if row.episode_id not in open_episodes]
    # whoever wrote the receipt tells RQ right after it, unless he was killed in between
    actions += [job for job, seconds in view.taken_seconds.items() if trusted and seconds >= lease_seconds]
    return actions + _orphans(view)


def _about(row: OpenEpisode, view: Snapshot, *, trusted: bool) -> Repair | None:
    """What an open row needs."""
    if row.state is EpisodeState.RUNNING:
        lost = trusted and view.lease_ends.get(row.episode_id, 0.0) < view.now
        return Finish(row.episode_id) if lost else None
    if row.state is not EpisodeState.QUEUED:
        return None
    if row.cancelled:
        return End(row.episode_id, Outcome.CANCELLED)
    if trusted and row.trainer_id and row.trainer_id in view.lost_trainers:
        return End(row.episode_id, Outcome.TRAINER_LOST)
    if trusted and row.batch and view.apart_seconds.get(row.episode_id, 0.0) >= row.together_seconds:
        return End(row.episode_id, Outcome.ADMISSION_TIMEOUT)  # the others' windows run while they wait for it
    # a slot that popped the job just before an outage of Redis takes its lease when that is over
    suspected = view.suspected_seconds.get(row.job_id, 0.0) >= SUSPECT_SECONDS
    return Enqueue(row.episode_id, row.lost_jobs) if trusted and suspected else None


def apart(rows: Sequence[OpenEpisode]) -> set[str]:
    """Queued episodes of reserved batches of which others run."""
    running = {row.batch for row in rows if row.batch and row.state is EpisodeState.RUNNING}
    return {row.episode_id for row in rows if row.batch in running and row.state is EpisodeState.QUEUED}


def _orphans(view: Snapshot) -> list[Repair]:
    unsettled = {row.allocation_id: row for row in view.unsettled}
    found = dict(view.kept_orphans)
    for row in view.sandboxes:
        if is_orphan(row, view.farm_tag, unsettled.get(row.metadata.get("allocation", ""))):
            found[row.sandbox_id] = row.metadata.get("allocation", "")
    return [DeleteOrphan(sandbox_id, allocation_id) for sandbox_id, allocation_id in found.items()]


def is_orphan(row: SandboxRow, farm_tag: str | None, allocation: Allocation | None) -> bool:
    """Whether this sandbox is ours and nobody's: judged by its own row, not by what the provider was asked for.

    `allocation` is the one that its tags name, as the ledger has it, or None. One that is open and not named yet may be
    this very sandbox, and settles it; one that names another sandbox never uses this one (a key that was not honoured).
    """
    if farm_tag is None or row.metadata.get("farm") != farm_tag:
        return False
    if allocation is None or allocation.state.settled:
        return True
    return allocation.sandbox_id is not None and allocation.sandbox_id != row.sandbox_id
