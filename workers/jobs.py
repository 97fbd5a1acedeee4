"""The one function that RQ runs, in a freshly forked horse: lease, admission, executor, receipt.

RQ can hand a job nothing but its JSON arguments, so the slot's context is the one process-wide value of the farm: bound
by the slot before it forks, read by the horse. It holds no connection; every connection is made after the fork.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from redis.exceptions import RedisError

from orchestrator.errors import EpisodeAborted, FarmError, LeaseLost
from orchestrator.farm import Farm
from orchestrator.limiter import Admission
from orchestrator.mailbox import Mailbox
from orchestrator.provider import Provider
from orchestrator.records import EpisodeSpec, Receipt
from orchestrator.rows import Lease
from orchestrator.settings import Budgets, Settings
from orchestrator.transcripts import Transcript
from orchestrator.vocabulary import Drive, Outcome, Phase
from workers.allocator import Allocator
from workers.drivers import drive_remote, drive_script
from workers.executor import Executor, Parts
from workers.lease_keeper import LeaseKeeper
from workers.session import PolicySession
from workers.timeline import Timeline

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotContext:
    """What a slot knows before it forks; nothing of it has made a request, sessions are made in the horse only."""

    settings: Settings
    worker_id: str
    slot_id: str
    farm: Farm
    provider: Provider
    make_session: Callable[[Budgets], PolicySession]


_BEATS_AWAITED = 1.5
"""For so many beats of a trainer its slot still waits after the heartbeat has run out."""

_BEAT_LOOK_SECONDS = 0.1
"""How often a slot that has created nothing yet looks whether the trainer is back."""

_context: SlotContext | None = None
_closing = False


def bind(context: SlotContext) -> None:
    """Set this process's context; called once by the slot."""
    global _context
    _context = context


def warm_up() -> None:
    """Do once in an idle horse what a first episode would wait for: connections, the SDK's runtime, touched memory.

    The Terminus session is closed again: an idle slot holds no place of the server.
    """
    if _context is None:
        return
    try:
        _context.farm.redis.ping()
        _context.provider.prepare()
        session = _context.make_session(_context.settings.budgets)
        session.prepare()
        session.close()
    except (FarmError, RedisError, OSError) as error:
        logger.warning("not warmed up: %s", error)


def run_episode(spec: dict[str, Any], attempt: int) -> dict[str, Any]:
    """Run one attempt of one episode; what RQ keeps as the job's result is only a pointer to the receipt."""
    if _context is None:
        raise RuntimeError("no slot context: this function runs in a farm worker only")
    signal.signal(signal.SIGTERM, _close_episode)
    episode = EpisodeSpec.model_validate(spec)
    outcome = _Run(_context, episode, attempt).run()
    return {"episode": episode.episode_id, "outcome": outcome}


def _close_episode(signum: int, frame: Any) -> None:
    """The worker has to stop now: end the episode at its next boundary instead of finishing it."""
    global _closing
    _closing = True


class _Run:
    """One horse's work."""

    def __init__(self, context: SlotContext, spec: EpisodeSpec, attempt: int) -> None:
        farm = context.farm
        self._context = context
        self._spec = spec
        self._attempt = attempt
        self._redis, self._ledger, self._limiter = farm.redis, farm.ledger, farm.limiter
        self._presence, self._queue = farm.presence, farm.queue
        self._looked = 0.0
        self._missed: float | None = None
        """Since when the trainer's heartbeat has not been seen."""
        self._budgets = spec.budgets

    def run(self) -> str:
        settings, episode_id = self._context.settings, self._spec.episode_id
        owner = f"{self._context.slot_id}-{os.getpid()}-{secrets.token_hex(4)}"
        session = self._context.make_session(self._budgets)
        session.prepare()  # connecting goes on while Redis is asked
        lease = self._ledger.take(episode_id, self._attempt, owner, lease_seconds=settings.lease_lost_seconds)
        if lease is None:
            session.close()
            logger.warning("not ours to run: its row names another job or is over", extra={"episode": episode_id})
            return "skipped"
        if self._spec.trainer_id is None and not lease.cancelled:
            self._looked = time.monotonic()  # the lease has said it all
        keeper = LeaseKeeper(
            self._ledger,
            lease,
            renew_seconds=settings.lease_renew_seconds,
            lost_seconds=settings.lease_lost_seconds,
        )
        with keeper:
            return self._run_leased(lease, keeper, session)

    def _run_leased(self, lease: Lease, keeper: LeaseKeeper, session: PolicySession) -> str:
        allocator = Allocator(
            self._spec.episode_id,
            lease.token,
            allocations=self._ledger.allocations,
            limiter=self._limiter,
            provider=self._context.provider,
            check=lambda: self._check(keeper),
            cleanup_seconds=self._budgets.cleanup_seconds,
        )
        settings = self._context.settings
        parts = Parts(
            ledger=self._ledger,
            provider=self._context.provider,
            allocator=allocator,
            session=session,
            open_session=lambda: self._context.make_session(self._budgets),
            transcript=Transcript(
                self._redis,
                self._spec.episode_id,
                limit_bytes=settings.transcript_bytes,
                retention_seconds=settings.receipt_retention_seconds,
            ),
            farm_tag=lease.farm_tag,
            worker_id=self._context.worker_id,
            check=lambda: self._check(keeper),
            allow=keeper.allow,
        )
        timeline = Timeline(
            deadline_seconds=self._budgets.deadline_seconds, window_seconds=self._budgets.policy_window_seconds
        )
        timeline.note(Phase.QUEUE, max(0.0, lease.taken_at - lease.queued_at))  # Redis's clock may step back
        executor = Executor(self._spec, lease, self._budgets, parts, timeline)
        try:
            receipt = self._drive(lease, keeper, executor, timeline)
        except BaseException:
            try:
                allocator.abandon()  # no receipt can be written: whoever holds the token now finishes the episode
            finally:
                executor.leave()
            raise
        return receipt.outcome if receipt is not None else "deferred"

    def _drive(self, lease: Lease, keeper: LeaseKeeper, executor: Executor, timeline: Timeline) -> Receipt | None:
        mailbox = Mailbox(self._redis, self._spec.episode_id, deadline_seconds=self._budgets.deadline_seconds)
        try:
            with timeline.timed(Phase.ADMISSION):
                admission = self._admit(keeper)
        except EpisodeAborted as error:
            if not _closing or self._ledger.cancelled(self._spec.episode_id):
                return executor.abort(error)
            admission = Admission.STEP_BACK  # it has begun nothing: another worker can do it
        if admission is Admission.STEP_BACK:
            self._step_back(lease)
            return None
        if self._spec.drive is Drive.REMOTE:
            return drive_remote(executor, mailbox, lease.token)
        if self._spec.policy is None:
            raise RuntimeError("the schema lets no autonomous episode pass without a policy")
        return drive_script(executor, self._spec.policy)

    def _admit(self, keeper: LeaseKeeper) -> Admission:
        budgets, reservation = self._budgets, self._spec.reservation_id
        wait = budgets.reserved_admission_seconds if reservation else budgets.admission_seconds
        keeper.allow(wait + self._context.settings.lease_lost_seconds)
        self._await_trainer(keeper)
        asked = count()  # at first, when the lease has just said it all, and at wakes: a cancellation wakes it
        return self._limiter.admit(
            self._spec.episode_id,
            reservation_id=reservation,
            wait_seconds=wait,
            check=lambda: self._check(keeper, now=next(asked) > 0),
        )

    def _step_back(self, lease: Lease) -> None:
        """Leave the slot to a reserved batch, or with the worker: to the queue's end, as the next attempt's job."""
        if not self._ledger.defer(lease):
            raise LeaseLost(f"{lease.episode_id}: not ours to give back")
        self._queue.enqueue(self._spec, lease.attempt + 1)

    def _check(self, keeper: LeaseKeeper, *, now: bool = False) -> None:
        """Raise when this episode has to end: lease lost, worker closing, trainer gone, cancelled.

        The last two are looked up at most once a second, unless it has to be `now`.
        """
        keeper.check()
        if _closing:
            raise EpisodeAborted(Outcome.CANCELLED, "its worker was told to stop and its drain time is over")
        looked = time.monotonic()
        if looked - self._looked < 1.0 and not now:
            return
        self._looked = looked
        self._check_trainer(looked)
        if self._ledger.cancelled(self._spec.episode_id):
            raise EpisodeAborted(Outcome.CANCELLED, "cancelled")

    def _await_trainer(self, keeper: LeaseKeeper) -> None:
        """Nothing is created for a trainer that may be gone: first its next heartbeat, or its loss."""
        if self._spec.trainer_id is None:
            return
        self._check(keeper, now=True)
        while self._missed is not None:
            time.sleep(_BEAT_LOOK_SECONDS)
            self._check(keeper, now=True)

    def _check_trainer(self, looked: float) -> None:
        """A heartbeat that is missing is waited for once more: a step of Redis's clock ends all that there are."""
        trainer = self._spec.trainer_id
        if trainer is None or self._presence.trainer_alive(trainer):
            self._missed = None
            return
        self._missed = looked if self._missed is None else self._missed
        settings = self._context.settings
        if looked - self._missed >= min(_BEATS_AWAITED * settings.trainer_beat_seconds, settings.trainer_lost_seconds):
            raise EpisodeAborted(Outcome.TRAINER_LOST, f"trainer {trainer} has sent no heartbeat")
