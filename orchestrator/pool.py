"""The trainer's side of the farm: submit tasks, drive episodes from here, wait for receipts. Needs only Redis.

What always holds: an episode's row is open before its job exists, so nothing submitted is lost; whoever waits, waits on
receipts and mailboxes; while a pool is open its heartbeat says so, and its remote episodes end when that stops.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType

from pydantic import ValidationError
from redis.exceptions import RedisError

from orchestrator.arguments import require_kind, require_seconds
from orchestrator.budget import Balance
from orchestrator.cancellation import Cancellation, Ending
from orchestrator.connection import BLOCK_SECONDS, Patience, redis_border, require_answer
from orchestrator.episodes import Episode
from orchestrator.errors import CapacityError, FarmError, PlacesTaken, ReceiptOverdue, RedisUnavailable
from orchestrator.farm import open_farm
from orchestrator.finished import START, Finished
from orchestrator.limiter import Capacity, Limiter
from orchestrator.mailbox import Mailbox
from orchestrator.records import EpisodeSpec, Script, SettledReceipt, is_id
from orchestrator.settings import Budgets, Settings
from orchestrator.tasks import Task, builtin_names
from orchestrator.vocabulary import Drive

logger = logging.getLogger(__name__)


_MESSAGE_MARGIN = 15
"""Seconds that an OpenEnv message may take beyond the command it carries (25 s for one of 10 s)."""

_VERIFIER_MARGIN = 100
"""Seconds that a verifier lives beyond its command's answer (120 s for one of 20 s)."""


@dataclass(frozen=True)
class Reservation:
    """Capacity held for a batch; give it to `submit`, leave the block to give back what was not used."""

    reservation_id: str
    count: int
    limiter: Limiter

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @redis_border
    def release(self) -> None:
        """Give back what is left of it."""
        self.limiter.release_reservation(self.reservation_id)


class Pool:
    """A connection to the farm for one run. Use as a context manager; threads may share it.

    With `budget_usd` the run may spend so much in all, what it spent before included (budget.py): episodes that could
    cost more end as budget_exhausted. Without it, a limit that was set before stays. Raises FarmError for a `run_id`
    that cannot be one.
    """

    def __init__(
        self, settings: Settings, *, run_id: str | None = None, budget_usd: Decimal | float | str | None = None
    ) -> None:
        self.run_id = f"run-{secrets.token_hex(5)}" if run_id is None else checked_run_id(run_id)
        self.trainer_id = f"trainer-{secrets.token_hex(6)}"
        self.settings = settings
        farm = open_farm(settings)
        require_answer(settings)
        self.redis, self.ledger = farm.redis, farm.ledger
        Patience().shared_by(farm.redis, farm.queue.rq.connection)
        self._limiter, self._queue, self._presence = farm.limiter, farm.queue, farm.presence
        self._budget = farm.budget
        if budget_usd is not None:
            redis_border(self._budget.set)(budget_usd, run_id=self.run_id)
        self._finished = Finished(self.redis, self.run_id)
        self._cancellation = Cancellation(farm)
        self._episodes: dict[str, Episode] = {}
        self._begun: dict[str, Episode] = {}
        """Those whose submission has not ended, or never did: it was interrupted, and nobody has a handle on them."""
        self._keeping = threading.Lock()
        self._stop = threading.Event()
        self._beginning = threading.Lock()
        self._beating: threading.Thread | None = None
        self._claimed: set[str] = set()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def submitted(self) -> list[str]:
        """Ids of the episodes submitted here and not forgotten, in order."""
        return [episode.episode_id for episode in self._kept()]

    @redis_border
    def capacity(self) -> Capacity:
        """What could be admitted now; live slots are those that take this pool's jobs (`FARM_QUEUE`)."""
        return self._limiter.capacity(self.settings.queue)

    @redis_border
    def balance(self) -> Balance:
        """What the run has spent, what is reserved for its running episodes, and its limit."""
        return self._budget.read(self.run_id)

    @redis_border
    def claim_run(self, run_id: str) -> bool:
        """Whether this pool alone drives the run until it releases it; False while another living one does."""
        if not self._presence.claim_run(run_id, self.trainer_id):
            return False
        self._claimed.add(run_id)
        self._beat()
        return True

    @redis_border
    def claim_left_seconds(self, run_id: str) -> float:
        """How long the last claim of the run still counts: each renewal makes it longer, 0 says that there is none."""
        return self._presence.claim_left_seconds(run_id)

    @redis_border
    def release_run(self, run_id: str) -> None:
        """Give the claim up; one that a killed process held ends by itself."""
        self._claimed.discard(run_id)
        self._presence.release_run(run_id, self.trainer_id)

    @redis_border
    def reserve(self, count: int, *, wait_seconds: float = 0.0) -> Reservation:
        """Reserve `count` places, all or nothing, waiting in line for them for at most `wait_seconds`.

        Batches and episodes without a reservation are served in the order in which they came. Raises CapacityError:
        NeverFits at once when the batch could never be live together, saying what to add; PlacesTaken after the wait
        when others still have the places, or came first; itself for a count that is none.
        """
        require_seconds("wait_seconds", wait_seconds)
        if not isinstance(count, int) or isinstance(count, bool):
            raise CapacityError(f"a batch is a whole number of episodes, got {count!r}: give an int")
        if count < 1:
            raise CapacityError(f"a batch needs at least one episode, got {count}")
        reservation_id = f"reservation-{secrets.token_hex(6)}"
        budgets = self.settings.budgets
        if not self._limiter.reserve(
            reservation_id,
            count,
            life_seconds=budgets.reserved_admission_seconds,
            wait_seconds=wait_seconds,
            patience_seconds=budgets.admission_seconds,
            queue=self.settings.queue,
        ):
            free, line = self.capacity(), self._limiter.read()
            raise PlacesTaken(
                f"{count} places wanted, {free.free} free now ({free.live_slots} slots, limit "
                f"{free.concurrency_limit}, {free.permits} running, {free.reserved} reserved; in line "
                f"{line.waiting} episodes, {line.batches_waiting} batches): "
                "wait for those who came first (wait_seconds=...) or add workers"
            )
        return Reservation(reservation_id, count, self._limiter)

    @redis_border
    def submit(
        self,
        task: Task,
        *,
        policy: Script | None = None,
        group_id: str | None = None,
        reservation: Reservation | None = None,
        episode_id: str | None = None,
        budgets: Budgets | None = None,
    ) -> Episode:
        """Enqueue one episode: with a policy it runs by itself, without one it is driven from here.

        The same `episode_id` again is the same episode, as it was first submitted. Raises FarmError for what the schema
        refuses, PlacesTaken for a reservation that is over: places are kept for reserved_admission_seconds after the
        last submission.
        """
        require_kind("episode_id", episode_id, str, "one of your own, or leave it out for a new one")
        require_kind("reservation", reservation, Reservation, "what Pool.reserve returned")
        require_kind("budgets", budgets, Budgets, "Budgets(...) from orchestrator.settings")
        if episode_id is not None and (kept := self._episodes.get(episode_id)) is not None:
            return kept
        if not isinstance(task, Task):
            raise FarmError(_no_task(task))
        drive = Drive.REMOTE if policy is None else Drive.AUTONOMOUS
        try:
            spec = EpisodeSpec(
                episode_id=episode_id or f"e-{secrets.token_hex(8)}",
                run_id=self.run_id,
                group_id=group_id,
                task=task,
                template=task.template or self.settings.template,
                drive=drive,
                policy=policy,
                trainer_id=self.trainer_id if policy is None else None,
                reservation_id=reservation.reservation_id if reservation else None,
                budgets=_with_own(budgets or self.settings.budgets, task),
            )
        except ValidationError as error:
            raise FarmError(f"this episode cannot be: {_problems(error)}") from None
        if reservation is not None:
            self._renew(reservation, spec.episode_id)
        if drive is Drive.REMOTE:
            self._beat()
        episode = self._handle(spec)
        with self._keeping:
            self._begun[spec.episode_id] = episode
        if not self.ledger.open(spec) and (row := self.ledger.row(spec.episode_id)) is not None:
            spec, episode = row.spec, self._handle(row.spec)
        self._queue.enqueue(spec)
        with self._keeping:  # another thread may have submitted the same id meanwhile: both get one handle
            kept = self._episodes.setdefault(spec.episode_id, episode)
            self._begun.pop(spec.episode_id, None)
        return kept

    def _handle(self, spec: EpisodeSpec) -> Episode:
        return Episode(
            spec,
            Mailbox(self.redis, spec.episode_id, deadline_seconds=spec.budgets.deadline_seconds),
            self.ledger,
            self._finished if spec.run_id == self.run_id else Finished(self.redis, spec.run_id),
            self._queue,
            lease_lost_seconds=self.settings.lease_lost_seconds,
        )

    def as_completed(
        self,
        episodes: Iterable[Episode] | None = None,
        *,
        timeout_seconds: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[SettledReceipt]:
        """Yield receipts as episodes end; `check` is called when none did for some seconds, and may raise to give up.

        Raises ReceiptOverdue (a TimeoutError) when nothing ended for `timeout_seconds`, FarmError when the farm knows
        one no longer.
        """
        require_seconds("timeout_seconds", timeout_seconds, or_none=True)
        require_kind("as_completed", episodes, Iterable, "a list of episodes, or nothing for all of this pool")
        read = redis_border(self.ledger.receipt)
        wanted = self._kept() if episodes is None else list(episodes)
        waiting = {episode.episode_id for episode in wanted}
        position, quiet_since = START, time.monotonic()
        elsewhere = [episode.episode_id for episode in wanted if episode.run_id != self.run_id]
        while waiting:
            for episode_id in elsewhere:  # submitted before, under another run: its stream is not ours
                if episode_id in waiting and (receipt := read(episode_id)) is not None:
                    waiting.discard(episode_id)
                    quiet_since = time.monotonic()
                    yield receipt
            if not waiting:
                return
            patience = BLOCK_SECONDS if timeout_seconds is None else quiet_since + timeout_seconds - time.monotonic()
            ended = redis_border(self._finished.after)(position, patience)
            if not ended:
                check()
                self._require_known(waiting)
            for entry, episode_id in ended:
                position = entry
                if episode_id in waiting and (receipt := read(episode_id)) is not None:
                    waiting.discard(episode_id)
                    quiet_since = time.monotonic()
                    yield receipt
            if waiting and timeout_seconds is not None and time.monotonic() - quiet_since > timeout_seconds:
                raise ReceiptOverdue(f"no episode ended for {timeout_seconds:g} s; still open: {sorted(waiting)}")

    @redis_border
    def receipts(self, episodes: Sequence[Episode]) -> list[SettledReceipt]:
        """Wait for all of them; in the given order."""
        require_kind("receipts", episodes, Sequence, "a list of episodes")
        done = {settled.receipt.episode_id: settled for settled in self.as_completed(episodes)}
        return [done[episode.episode_id] for episode in episodes]

    def forget(self, episode: Episode) -> None:
        """Drop the handle on an episode that has ended: a pool that serves a long run would keep them all."""
        with self._keeping:
            self._episodes.pop(episode.episode_id, None)

    @redis_border
    def cancel(self, *, group_id: str | None = None, wait_seconds: float = 120.0) -> Ending:
        """End every open episode of this pool's run, or of one group of it, whoever submitted them.

        Queued ones have their receipts when this returns; running ones are waited for, at most `wait_seconds`, until
        their sandboxes are confirmed absent. What is `open` or `unsettled` in the answer was not done in that time.
        """
        require_seconds("wait_seconds", wait_seconds)
        named = self._cancellation.matching(run_id=self.run_id, group_id=group_id)
        self._cancellation.ask(named)
        return self._cancellation.wait(named, wait_seconds)

    def close(self) -> None:
        """Cancel this pool's open remote episodes and stop its heartbeat. Can be called again."""
        with self._keeping:
            begun = list(self._begun.values())
        for episode in [*(it for it in self._kept() if it.remote), *begun]:  # begun: whatever drives them
            try:
                episode.cancel()
            except (FarmError, RedisError) as error:
                logger.error("not cancelled: %s", error, extra={"episode": episode.episode_id})
                if isinstance(error, RedisUnavailable | RedisError):
                    break  # ten seconds for each of them would not bring it back: they end as trainer_lost
        self._stop.set()
        if self._beating is not None:
            self._beating.join()
            self._beating = None

    def _kept(self) -> list[Episode]:
        with self._keeping:  # other threads may submit and forget while we look
            return list(self._episodes.values())

    @redis_border
    def _require_known(self, episodes: Iterable[str]) -> None:
        if gone := self.ledger.forgotten(episodes):
            raise FarmError(f"the farm does not know {gone[0]} (any more): its Redis was emptied, or it is old")

    def _renew(self, reservation: Reservation, episode_id: str) -> None:
        """Without its place an episode would wait in line while the others of its batch wait for it."""
        if not self._limiter.renew_reservation(reservation.reservation_id) and self.ledger.row(episode_id) is None:
            kept = self.settings.budgets.reserved_admission_seconds
            raise PlacesTaken(
                f"nothing is left of this reservation of {reservation.count}: all its places are drawn, it was given "
                f"back, or nobody submitted for {kept:g} s; reserve again, right before the episodes are submitted"
            )

    def _beat(self) -> None:
        with self._beginning:  # several threads may submit their first episode at once
            if self._beating is None:
                self._presence.beat_trainer(self.trainer_id)
                self._stop.clear()
                self._beating = threading.Thread(target=self._keep_beating, name="trainer-heartbeat", daemon=True)
                self._beating.start()

    def _keep_beating(self) -> None:
        while not self._stop.wait(self.settings.trainer_beat_seconds):
            try:
                self._presence.beat_trainer(self.trainer_id)
                for run_id in tuple(self._claimed):
                    self._presence.claim_run(run_id, self.trainer_id)
            except RedisError as error:
                logger.warning("heartbeat not sent: %s", error)


def checked_run_id(run_id: str) -> str:
    """This id; raises FarmError when no run can have it."""
    if not is_id(run_id):
        raise FarmError(f"a run's id is 1 to 64 of a-z, 0-9 and '-', got {run_id!r}: leave it out for a new one")
    return run_id


def _no_task(given: object) -> str:
    way = "load_builtin('weekly-sales')"
    if isinstance(given, str):
        way = f"load_builtin({given!r})" if given in builtin_names() else f"one of load_tasks({given!r})"
    elif isinstance(given, Mapping):
        way = "parse_task(...) makes one of plain data"
    return f"submit takes a Task, got {type(given).__name__}; pass a Task: {way} (from orchestrator.tasks)"


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'it'}: {problem['msg']}" for problem in error.errors())


def _with_own(budgets: Budgets, task: Task) -> Budgets:
    """The farm's budgets with the task's own in their place, and those that have to enclose them grown with them.

    Raises ValidationError when one has to grow past its bound.
    """
    own = task.budgets.model_dump(exclude_none=True) if task.budgets else {}
    deadline = own.get("deadline_seconds", budgets.deadline_seconds)
    command = own.get("command_seconds", budgets.command_seconds)
    verifier = max(own.get("verifier_command_seconds", budgets.verifier_command_seconds), command)
    own["policy_lifetime_seconds"] = max(budgets.policy_lifetime_seconds, math.ceil(deadline))
    own["verifier_lifetime_seconds"] = max(budgets.verifier_lifetime_seconds, math.ceil(verifier) + _VERIFIER_MARGIN)
    longest = max(command, budgets.create_request_seconds)
    own["message_seconds"] = max(budgets.message_seconds, longest + _MESSAGE_MARGIN)
    return Budgets.model_validate({**budgets.model_dump(), **own})
