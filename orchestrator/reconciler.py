"""Finishing what killed processes left behind: one look, a pure plan (plan.py), then its application.

What always holds: a lost episode is seized under a new token before anything of it is touched, so its old owner is
refused from then on; the provider's list is read before the ledger, and unsettled sandboxes before open episodes, so
what is born during a look is neither an orphan nor left behind; what could not be settled stays listed by id until it
is. Looking plans, it changes no row. What this process measures itself runs on its own clock, which nobody sets; what
Redis's clock measured before it stepped back begins anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from orchestrator.allocations import RECONCILER_TOKEN
from orchestrator.endings import end_queued, unrun_receipt
from orchestrator.errors import FarmError, LeaseLost, ProviderError
from orchestrator.ledger import Ledger
from orchestrator.limiter import Limiter
from orchestrator.pacing import PacedProvider
from orchestrator.plan import DeleteOrphan, End, Enqueue, Finish, Forget, Repair, Settle, Snapshot, apart, plan
from orchestrator.presence import Presence
from orchestrator.provider import Provider, SandboxRow
from orchestrator.queue import JobQueue
from orchestrator.records import Allocation
from orchestrator.settlement import Settlement
from orchestrator.unresolved import Kind
from orchestrator.vocabulary import EpisodeState, Outcome, episode_of_job

logger = logging.getLogger(__name__)

_LOST_JOBS = 5
"""How often a queued episode's job may be lost before the episode ends: its job kills whoever takes it."""

_WATCH_SECONDS = 1.0


@dataclass
class Report:
    """What one round did, and what it could not."""

    enqueued: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    """Sandboxes that were deleted because they were ours and nobody's."""
    forgotten: list[str] = field(default_factory=list)
    """Jobs of episodes that are over, which RQ still called taken."""
    failures: dict[tuple[Kind, str], str] = field(default_factory=dict)

    @property
    def unresolved(self) -> dict[str, str]:
        """Id of what is still open -> why."""
        return {name: reason for (_, name), reason in self.failures.items()}

    def as_json(self) -> dict[str, Any]:
        """As `rollout-farm reconcile` prints it."""
        done = {name: getattr(self, name) for name in ("enqueued", "finished", "settled", "orphans", "forgotten")}
        return {**done, "unresolved": self.unresolved}


class Reconciler:
    """Looks, plans and applies; `name` identifies this process as an owner of seized leases.

    With `only_looks` nothing is ever written to Redis or asked of the provider but its list, and `run_once` raises.
    """

    def __init__(
        self,
        name: str,
        *,
        ledger: Ledger,
        presence: Presence,
        queue: JobQueue,
        limiter: Limiter,
        provider: Provider,
        lease_seconds: float,
        create_answer_seconds: float = 10.0,
        sweep_seconds: float = 10.0,
        only_looks: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._name = name
        self._ledger = ledger
        self._presence = presence
        self._queue = queue
        self._limiter = limiter
        self._only_looks = only_looks
        self._provider = PacedProvider(provider, limiter, tells_limiter=not only_looks, clock=clock)
        self._settlement = Settlement(ledger, self._provider, create_answer_seconds=create_answer_seconds)
        self._lease_seconds = lease_seconds
        self._sweep_seconds = sweep_seconds
        self._watched_since = ledger.now()
        self._suspected: dict[str, float] = {}
        self._apart: dict[str, float] = {}
        self._taken: dict[Forget, float] = {}
        """Jobs that were over and still taken when the last sweep looked -> since when, on our clock."""
        self._swept = float("-inf")
        self._list_failure: str | None = None
        self._clock = clock
        self._sleep = sleep
        self._looked = clock()
        self._redis_ahead = self._watched_since - self._looked
        """Redis's clock less ours: it changes when either is set."""

    def interrupted(self) -> None:
        """Redis was away: give every lease its full time again before anything is declared lost."""
        self._apart.clear()
        self._watched_since = self._ledger.now()

    @property
    def beat_seconds(self) -> float:
        """How often `beat` has to be called between two rounds, so that the rest itself is not taken for an outage."""
        return self._lease_seconds / 4

    def beat(self) -> None:
        """Redis has answered during a rest between two rounds; the time since the last such answer is judged."""
        self._note_pause(self._ledger.now())
        self._looked = self._clock()

    def watch(self, seconds: float) -> None:
        """Look on for this long and do nothing: what a first round needs to have seen before it judges."""
        ends = self._clock() + seconds
        while (left := ends - self._clock()) > 0:
            self._look(sandboxes=[])
            self._sleep(min(left, _WATCH_SECONDS, self._lease_seconds / 4))

    def look(self, *, sweep: bool = False) -> Snapshot:
        """Read the rows that a plan is made of; the provider's list when a sweep for orphans is due, or at once."""
        now = self._ledger.now()
        due = sweep or self._clock() - self._swept >= self._sweep_seconds
        self._note_pause(now)  # before the list: the provider's slowness is no outage of Redis
        sandboxes = self._list() if due else []
        self._looked = self._clock()
        return self._look(sandboxes=sandboxes, now=now, sweep=due)

    def run_once(self, *, leading: Callable[[], bool] = lambda: True) -> Report:
        """Look, plan, apply; stops early when `leading`, asked before each action, says that another leads."""
        if self._only_looks:
            raise RuntimeError("this reconciler only looks")
        report = Report()
        view = self.look()
        for action in plan(view, lease_seconds=self._lease_seconds):
            if not leading():
                return report
            try:
                self._apply(action, report)
            except (FarmError, ValidationError) as error:  # one unreadable row must not keep the others waiting
                report.failures[_named(action)] = str(error)
            self._looked = self._clock()
        if not leading():
            return report
        self._begin_anew(view)
        if self._list_failure is not None:
            report.failures[Kind.PROVIDER, "list"] = self._list_failure
        self._ledger.unresolved.replace(report.failures, now=self._ledger.now())
        return report

    def _look(self, *, sandboxes: list[SandboxRow], now: float | None = None, sweep: bool = False) -> Snapshot:
        if now is None:
            now = self._ledger.now()
            self._note_pause(now)
            self._looked = self._clock()
        taken = self._taken_jobs() if sweep else set(self._taken)
        unsettled = self._ledger.allocations.unsettled()
        rows = self._ledger.open_rows()  # after those: an episode that begins meanwhile has none among them
        queues = {row.queue for row in rows}
        waiting = {job for name in queues for job in self._queue.named(name).waiting()}
        queued = {row.job_id for row in rows if row.state is EpisodeState.QUEUED}
        clock = self._clock()
        self._suspected = {job: self._suspected.get(job, clock) for job in queued - waiting}
        self._apart = {episode: self._apart.get(episode, clock) for episode in apart(rows)}
        named = {row.job_id for row in rows}
        self._taken = {job: self._taken.get(job, clock) for job in taken if job.job_id not in named}
        return Snapshot(
            now=now,
            watched_since=self._watched_since,
            open=rows,
            lease_ends=self._ledger.lease_ends(),
            suspected_seconds={job: clock - since for job, since in self._suspected.items()},
            apart_seconds={episode: clock - since for episode, since in self._apart.items()},
            unsettled=unsettled,
            taken_seconds={job: clock - since for job, since in self._taken.items()} if sweep else {},
            lost_trainers=self._presence.lost_trainers(
                {row.trainer_id for row in rows if row.trainer_id}, only_look=self._only_looks
            ),
            farm_tag=self._ledger.known_farm_tag(),
            sandboxes=sandboxes,
            kept_orphans=self._ledger.unresolved.orphans(),
        )

    def _taken_jobs(self) -> set[Forget]:
        """Jobs of our episodes only: another application's may be in the same database, under the same names."""
        taken = {Forget(job, queue.rq.name) for queue in self._queue.siblings() for job in queue.taken()}
        episodes = {one: episode_of_job(one.job_id) for one in taken}
        strangers = {"", *self._ledger.strangers(set(episodes.values()) - {""})}
        return {one for one, episode in episodes.items() if episode not in strangers}

    def _note_pause(self, now: float) -> None:
        clock = self._clock()
        step, self._redis_ahead = now - clock - self._redis_ahead, now - clock
        # an outage, ridden out by the client, looks like a long pause from here; a clock that is set makes every
        # lease look over at once, or none ever
        if clock - self._looked > self._lease_seconds / 2 or abs(step) > self._lease_seconds / 2:
            self._watched_since = now
            self._apart.clear()  # no slot could take anything either

    def _begin_anew(self, view: Snapshot) -> None:
        """The dead have no more than their time left, whatever Redis's clock did meanwhile."""
        self._limiter.drop_dead_creators()
        self._presence.drop_dead_slots()
        self._ledger.shorten_leases(lease_seconds=self._lease_seconds)
        for row in view.unsettled:
            if max(row.intended_at, row.created_at or 0, row.unknown_at or 0, row.unresolved_at or 0) > view.now:
                self._ledger.allocations.put_back(row)

    def _list(self) -> list[SandboxRow]:
        """What the provider says carries our tag; nothing when it does not answer, which proves nothing."""
        tag = self._ledger.known_farm_tag()
        self._swept = self._clock()
        try:
            rows = self._provider.list({"farm": tag}) if tag is not None else []
        except ProviderError as error:
            if self._list_failure != str(error):
                logger.warning("sandboxes not listed", extra={"error": str(error)})
            self._list_failure = str(error)
            return []
        self._list_failure = None
        return rows

    def _apply(self, action: Repair, report: Report) -> None:
        match action:
            case Enqueue(episode_id, lost_jobs):
                self._enqueue(episode_id, lost_jobs, report)
            case End(episode_id, outcome):
                self._end(episode_id, outcome, report)
            case Finish(episode_id):
                self._finish(episode_id, report)
            case Settle(allocation_id):
                allocation = self._ledger.allocations.get(allocation_id)
                if allocation is not None and not allocation.state.settled and self._over(allocation.episode_id):
                    self._settle(allocation, RECONCILER_TOKEN, report)
            case DeleteOrphan(sandbox_id):
                if self._settlement.delete_orphan(action):
                    logger.warning("orphan deleted", extra={"sandbox": sandbox_id})
                    report.orphans.append(sandbox_id)
            case Forget(job_id, queue):
                self._queue.named(queue).forget(job_id)
                self._taken.pop(action, None)
                report.forgotten.append(job_id)

    def _enqueue(self, episode_id: str, lost_jobs: int, report: Report) -> None:
        row = self._ledger.row(episode_id)
        if row is None or row.state is not EpisodeState.QUEUED or row.lost_jobs != lost_jobs:
            return
        try:
            spec = row.spec
        except FarmError:
            self._end(episode_id, Outcome.WORKER_LOST, report, detail="its job was lost and cannot be made again")
            return
        if lost_jobs >= _LOST_JOBS:
            self._end(episode_id, Outcome.WORKER_LOST, report)  # whoever takes this job dies of it
            return
        queue = self._queue.named(row.queue)
        queue.withdraw(row.job_id, lost=True)
        queue.enqueue(spec, row.attempt)
        self._ledger.count_lost_job(episode_id, counted=lost_jobs)  # last: a round that is cut short counts none
        self._suspected.pop(row.job_id, None)
        report.enqueued.append(episode_id)

    def _end(self, episode_id: str, outcome: Outcome, report: Report, *, detail: str | None = None) -> None:
        row = self._ledger.row(episode_id)
        if row is not None and end_queued(self._ledger, self._queue, row, outcome, detail=detail):
            report.finished.append(episode_id)

    def _finish(self, episode_id: str, report: Report) -> None:
        token = self._ledger.seize(episode_id, self._name, lease_seconds=self._lease_seconds)
        row = self._ledger.row(episode_id)
        if token is None or row is None:
            return
        allocations = self._ledger.allocation_ids(episode_id)
        for allocation in self._ledger.allocations.each(allocations):
            if allocation is not None and not allocation.state.settled:
                self._settle(allocation, token, report)
        outcome, detail = Outcome.WORKER_LOST, "the process that ran it is gone: its lease ran out"
        if self._ledger.cancelled(episode_id):
            outcome, detail = Outcome.CANCELLED, f"cancelled; {detail}"
        receipt = unrun_receipt(row, outcome, detail, self._ledger.now(), allocations)
        try:
            self._ledger.commit(receipt, token)
        except LeaseLost as error:
            report.failures[Kind.EPISODE, episode_id] = str(error)
        else:
            self._queue.named(row.queue).forget(row.job_id)  # nobody lives who would tell RQ that the job is over
            report.finished.append(episode_id)

    def _over(self, episode_id: str) -> bool:
        """Whether no slot can own the episode any more, asked before the provider is."""
        return self._ledger.state(episode_id) in (None, EpisodeState.FINAL)

    def _settle(self, row: Allocation, token: str, report: Report) -> None:
        reason = self._settlement.settle(row, token)
        if reason is None:
            report.settled.append(row.allocation_id)
        else:
            report.failures[Kind.ALLOCATION, row.allocation_id] = reason


def _named(action: Repair) -> tuple[Kind, str]:
    """What an action is about."""
    match action:
        case Settle(allocation_id):
            return Kind.ALLOCATION, allocation_id
        case DeleteOrphan(sandbox_id):
            return Kind.SANDBOX, sandbox_id
        case Enqueue(episode_id) | End(episode_id) | Finish(episode_id):
            return Kind.EPISODE, episode_id
        case Forget(job_id):
            return Kind.EPISODE, episode_of_job(job_id)
