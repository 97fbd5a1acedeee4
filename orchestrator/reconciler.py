"""Finishing what killed processes left behind: a pure plan, then its application, by one leader at a time.

What always holds: nothing is declared lost before its lease has run out and Redis has been up for one lease time; a
lost episode is seized under a new token before anything of it is touched, so its old owner is refused from then on;
what may still run keeps its permit and stays listed until its absence is confirmed or its longest life is over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from orchestrator.allocations import RECONCILER_TOKEN, Allocations
from orchestrator.errors import FarmError, LeaseLost, OutcomeUnknown, ProviderError
from orchestrator.ledger import EpisodeRow, Ledger, OpenEpisode, unrun_receipt
from orchestrator.provider import CreateRequest, Provider
from orchestrator.queue import JobQueue
from orchestrator.records import Allocation
from orchestrator.vocabulary import AllocationState, EpisodeState, Outcome

logger = logging.getLogger(__name__)

_SUSPECT_SECONDS = 10.0
"""A queued row whose job is neither waiting nor leased for this long: the worker that popped it is gone."""

_LOST_JOBS = 5
"""How often a queued episode's job may be lost before the episode ends: its job kills whoever takes it."""


@dataclass(frozen=True)
class Enqueue:
    """Put a queued episode's job (back) on the queue."""

    episode_id: str


@dataclass(frozen=True)
class Finish:
    """Seize a running episode whose lease has run out, settle its sandboxes, write `worker_lost`."""

    episode_id: str


@dataclass(frozen=True)
class Settle:
    """Go on with a sandbox that its episode's receipt could not wait for."""

    allocation_id: str


Action = Enqueue | Finish | Settle


@dataclass(frozen=True)
class Snapshot:
    """What the plan is made of; times in seconds of Redis."""

    now: float
    settled_since: float
    """Since when Redis has been up and looked at; leases that ran out while it was away are given one lease time."""
    open: Iterable[OpenEpisode]
    lease_ends: Mapping[str, float]
    suspected_since: Mapping[str, float]
    """Job id of a queued row -> since when it is neither waiting nor known to have been taken."""
    unsettled: Iterable[Allocation]


def plan(view: Snapshot, *, lease_seconds: float) -> list[Action]:
    """Decide what has to be done now."""
    actions: list[Action] = []
    open_episodes = set()
    trusted = view.now - view.settled_since >= lease_seconds
    for row in view.open:
        open_episodes.add(row.episode_id)
        if row.state is EpisodeState.QUEUED:
            if view.now - view.suspected_since.get(row.job_id, view.now) >= _SUSPECT_SECONDS:
                actions.append(Enqueue(row.episode_id))
        elif row.state is EpisodeState.RUNNING and trusted and view.lease_ends.get(row.episode_id, 0.0) < view.now:
            actions.append(Finish(row.episode_id))
    actions += [Settle(row.allocation_id) for row in view.unsettled if row.episode_id not in open_episodes]
    return actions


@dataclass
class Report:
    """What one round did, and what it could not."""

    enqueued: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    unresolved: dict[str, str] = field(default_factory=dict)
    """Allocation or episode id -> why it is still open."""


class Reconciler:
    """Looks, plans and applies; `name` identifies this process as an owner of seized leases."""

    def __init__(
        self,
        name: str,
        *,
        ledger: Ledger,
        queue: JobQueue,
        provider: Provider,
        lease_seconds: float,
        create_answer_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._ledger = ledger
        self._queue = queue
        self._provider = provider
        self._lease_seconds = lease_seconds
        self._settled_since = ledger.now()
        self._suspected: dict[str, float] = {}
        self._create_answer_seconds = create_answer_seconds
        self._clock = clock
        self._looked = clock()

    def interrupted(self) -> None:
        """Redis was away: give every lease its full time again before anything is declared lost."""
        self._settled_since = self._ledger.now()

    def look(self) -> Snapshot:
        """Read the rows that a plan is made of."""
        now = self._ledger.now()
        if self._clock() - self._looked > self._lease_seconds / 2:
            self._settled_since = now  # an outage, ridden out by the client, looks like a long pause from here
        self._looked = self._clock()
        rows = self._ledger.open_rows()
        waiting = self._queue.waiting()
        queued = {row.job_id for row in rows if row.state is EpisodeState.QUEUED}
        self._suspected = {job: self._suspected.get(job, now) for job in queued - waiting}
        return Snapshot(
            now=now,
            settled_since=self._settled_since,
            open=rows,
            lease_ends=self._ledger.lease_ends(),
            suspected_since=dict(self._suspected),
            unsettled=self._ledger.allocations.unsettled(),
        )

    def run_once(self, *, leading: Callable[[], bool] = lambda: True) -> Report:
        """Look, plan, apply; stops early when `leading`, asked before each action, says that another leads."""
        report = Report()
        for action in plan(self.look(), lease_seconds=self._lease_seconds):
            if not leading():
                break
            try:
                self._apply(action, report)
            except (FarmError, ValidationError) as error:  # one unreadable row must not keep the others waiting
                report.unresolved[str(action)] = str(error)
                logger.error("not done: %s: %s", action, error)
            self._looked = self._clock()
        return report

    def _apply(self, action: Action, report: Report) -> None:
        match action:
            case Enqueue(episode_id):
                self._enqueue(episode_id, report)
            case Finish(episode_id):
                self._finish(episode_id, report)
            case Settle(allocation_id):
                self._settle_later(allocation_id, report)

    def _enqueue(self, episode_id: str, report: Report) -> None:
        row = self._ledger.row(episode_id)
        if row is None or row.state is not EpisodeState.QUEUED:
            return
        if self._ledger.count_lost_job(episode_id) > _LOST_JOBS:
            self._give_up(row, report)
            return
        self._queue.forget(row.job_id)
        self._queue.enqueue(row.spec, row.attempt)
        self._suspected.pop(row.job_id, None)
        report.enqueued.append(episode_id)

    def _give_up(self, row: EpisodeRow, report: Report) -> None:
        """Whoever takes this job dies of it: take it ourselves, as a slot would, and end it."""
        lease = self._ledger.take(row.episode_id, row.attempt, self._name, lease_seconds=self._lease_seconds)
        if lease is not None:
            detail = f"its job was lost {_LOST_JOBS} times before anybody could begin it"
            receipt = unrun_receipt(row, Outcome.WORKER_LOST, detail, self._ledger.now())
            self._ledger.commit(receipt, lease.token)
            report.finished.append(row.episode_id)

    def _finish(self, episode_id: str, report: Report) -> None:
        token = self._ledger.seize(episode_id, self._name, lease_seconds=self._lease_seconds)
        row = self._ledger.row(episode_id)
        if token is None or row is None:
            return
        allocations = self._ledger.allocation_ids(episode_id)
        for allocation_id in allocations:
            allocation = self._ledger.allocations.get(allocation_id)
            if allocation is not None and not allocation.state.settled:
                self._settle(allocation, token, report)
        detail = "the process that ran it is gone: its lease ran out"
        receipt = unrun_receipt(row, Outcome.WORKER_LOST, detail, self._ledger.now(), allocations)
        try:
            self._ledger.commit(receipt, token)
        except LeaseLost as error:
            report.unresolved[episode_id] = str(error)
        else:
            report.finished.append(episode_id)

    def _settle_later(self, allocation_id: str, report: Report) -> None:
        allocation = self._ledger.allocations.get(allocation_id)
        if allocation is not None and not allocation.state.settled:
            self._settle(allocation, RECONCILER_TOKEN, report)

    def _settle(self, row: Allocation, token: str, report: Report) -> None:
        """Delete and confirm one sandbox, or keep it listed with the reason."""
        try:
            sandbox_id = row.sandbox_id or self._name_unknown(row, token)
            if sandbox_id is not None:
                self._delete(row, sandbox_id, token)
            current = self._ledger.allocations.get(row.allocation_id)
            if current is not None and current.state.settled:
                report.settled.append(row.allocation_id)
            else:
                report.unresolved[row.allocation_id] = "its creation cannot be settled yet"
        except FarmError as error:
            report.unresolved[row.allocation_id] = str(error)
            logger.warning("not settled", extra={"allocation": row.allocation_id, "error": str(error)})

    def _delete(self, row: Allocation, sandbox_id: str, token: str) -> None:
        """Delete, confirm, price at what the provider says of its size; raises what stood in the way."""
        ledger: Allocations = self._ledger.allocations
        try:
            seen = self._provider.describe(sandbox_id) if row.vcpus is None else None
            if seen is not None:
                row = ledger.sized(row, vcpus=seen.vcpus, memory_mb=seen.memory_mb)
            self._provider.delete(sandbox_id)
            if self._provider.describe(sandbox_id) is not None:
                raise OutcomeUnknown(f"{sandbox_id} is still there after its deletion was answered")
        except ProviderError as error:
            if row.state is AllocationState.CREATED:
                ledger.unresolved(row, token, str(error))
            raise
        now = self._ledger.now()
        began = row.created_at
        if began is None:  # its answer was lost: the provider knows since when it ran
            began = max(row.intended_at, seen.started_at) if seen is not None else now
        ledger.absent(row, token, running_ms=max(0, int((now - began) * 1000)))

    def _name_unknown(self, row: Allocation, token: str) -> str | None:
        """The sandbox of a creation whose answer was lost: repeat the stored create under its own key."""
        ledger: Allocations = self._ledger.allocations
        request = ledger.request(row.allocation_id)
        if request is None:
            raise FarmError(f"{row.allocation_id}: its create request is missing")
        try:
            sandbox_id = self._provider.create(request).sandbox_id
        except ProviderError as error:
            logger.info("creation not repeated: %s", error, extra={"allocation": row.allocation_id})
            found = self._find(request)
            if found is None:
                life = self._create_answer_seconds + request.lifetime_seconds
                if row.unknown_at is None or token != RECONCILER_TOKEN or isinstance(error, OutcomeUnknown):
                    # it may have been sent until just now, by its owner or by ourselves
                    ledger.unknown(row, token, str(error))
                elif self._ledger.now() > row.unknown_at + life:
                    ledger.expired(row, token, f"never named; its longest life is over ({error})")
                return None
            sandbox_id = found
        ledger.created(row, sandbox_id, token, creating_ms=0)
        return sandbox_id

    def _find(self, request: CreateRequest) -> str | None:
        """The sandbox that carries the allocation's own tags; that there is none proves nothing."""
        wanted = {"allocation": request.allocation_id, "farm": request.metadata.get("farm", "")}
        try:
            rows = self._provider.list(wanted)
        except ProviderError as error:
            logger.info("not listed: %s", error, extra={"allocation": request.allocation_id})
            return None
        return next((row.sandbox_id for row in rows if wanted.items() <= row.metadata.items()), None)
