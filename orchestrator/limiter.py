"""Who may hold a sandbox, over all processes and hosts; atomic, in Redis time. Who may create one: creations.py.

What always holds: an episode has at most one permit, and holds it until its sandboxes are confirmed absent; waiters
block on a list of their own and are woken by the release that frees their place, so nobody polls hot; what is reserved
for a batch is granted to nobody else; lowering a limit takes nothing from an episode that runs; with a permit goes a
reservation of the most that the episode can cost (budget.py).

Episodes without a reservation and batches that wait for theirs stand in one line, first come, first served. A batch is
served when it and all that stand before it have room; nobody behind it is served meanwhile. An episode whose slot is
needed by a reserved batch steps back to the queue and keeps its place: later batches do not pass that place. Until it
is back, the next episode that comes is served in its stead, so that the line never waits for one job in a long queue.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto

from redis import Redis
from redis.exceptions import RedisError

from orchestrator.connection import BLOCK_SECONDS
from orchestrator.cost import LIST_PRICES, Rates
from orchestrator.creations import Creation, Defaults, episode_over, limit_fell, report
from orchestrator.errors import ConcurrencyLimited, EpisodeAborted, NeverFits, RateLimited, SettingsError
from orchestrator.keys import Keys
from orchestrator.scripts import Scripts
from orchestrator.settings import HIGHEST_CONCURRENCY, HIGHEST_RATE, LOWEST_RATE, Budgets
from orchestrator.vocabulary import SLOTS_PER_WORKER, Outcome, Role

_PATIENCE_SECONDS = Budgets().admission_seconds
"""The longest wait for a permit where the caller names none."""

_STEP_BACK_SECONDS = 1.0
"""How long an episode without reservation keeps its slot from a reserved batch, so that it does not circle hot."""


class Admission(Enum):
    """What the limiter says to an episode."""

    GRANTED = auto()
    STEP_BACK = auto()
    """Its slot, or all the money, is reserved for others: leave the slot to them and come back."""


class PermitAnswer(Enum):
    """What acquire_permit.lua returns."""

    WAIT = 0
    GRANTED = 1
    STEP_BACK = 2
    NEVER = 3
    """The limit is below the batch's reservation."""
    OVER = 4
    """The episode has its receipt already, or is unknown: Redis has lost it."""
    RUN_BUDGET = 5
    """Its run's budget cannot pay for the episode at its most expensive."""
    FARM_BUDGET = 6
    """The farm's budget cannot."""
    OVERDUE = 7
    """It has waited for as long as it may, with all its attempts."""


@dataclass(frozen=True)
class Capacity:
    """What could be admitted now."""

    live_slots: int
    concurrency_limit: int
    permits: int
    reserved: int
    permits_elsewhere: int = 0
    """Of the permits, those of episodes of other queues: they hold none of these slots."""

    @property
    def free(self) -> int:
        """min(live slots, concurrency limit) minus what is admitted or reserved."""
        slots = self.live_slots + self.permits_elsewhere
        return max(0, min(slots, self.concurrency_limit) - self.permits - self.reserved)


@dataclass(frozen=True)
class LimiterReading:
    """What the limiter knows; rates are creations a second, 0 for no limit of ours."""

    concurrency_configured: int
    concurrency_effective: int
    concurrency_set_live: bool
    held: int
    """Permits."""
    sandboxes: int
    """Episodes that have a sandbox or are creating one."""
    waiting: int
    """Episodes that wait for a permit; those that stepped back to the queue and keep their place too."""
    batches_waiting: int
    batch_places_waiting: int
    """How many places those batches wait for."""
    reserved: int
    rate_configured: float
    rate_effective: float
    rate_set_live: bool
    refused_rate: float
    """The rate that the provider refused last; 0 for none."""
    cooldown_seconds: float
    verifiers_waiting_to_create: int
    policies_waiting_to_create: int
    creations: int
    """Attempts let through so far."""
    rate_limited: int
    """429 answers of the rate kind so far."""
    concurrency_limited: int
    """429 answers of the concurrency kind so far."""


class Limiter:
    """The farm's limiter; defaults apply until others are set. A simulation gives it a clock, in ms."""

    def __init__(
        self,
        redis: Redis,
        *,
        concurrency_limit: int,
        creation_rate: float,
        rates: Rates = LIST_PRICES,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        self._redis = redis
        self._scripts = Scripts(redis, clock_ms=clock_ms)
        self._defaults = Defaults(concurrency_limit, creation_rate)
        self._rates = rates

    def admit(
        self,
        episode_id: str,
        *,
        reservation_id: str | None,
        wait_seconds: float,
        check: Callable[[], None],
    ) -> Admission:
        """Wait in line for a permit; `check` is called now and then and may raise to give up.

        Raises EpisodeAborted(admission_timeout) when it has waited for `wait_seconds`, earlier attempts included, or
        when the limit has fallen below the batch's reservation; as budget_exhausted when a budget cannot pay for it
        (one that is only reserved is waited for, except in a batch); LeaseLost when the episode is over or unknown.
        """
        ends = time.monotonic() + wait_seconds
        stepped_back = False
        with self._leaving(episode_id):
            while True:
                check()
                answer = self.ask(episode_id, reservation_id=reservation_id, patience_seconds=wait_seconds)
                if answer is PermitAnswer.GRANTED:
                    return Admission.GRANTED
                if answer is PermitAnswer.STEP_BACK:
                    if stepped_back:
                        return Admission.STEP_BACK
                    stepped_back = True
                    _sleep(_STEP_BACK_SECONDS, check)
                    continue
                if answer is PermitAnswer.NEVER:
                    raise limit_fell()
                if answer in _BROKE:
                    run = self._redis.hget(Keys.episode(episode_id), "run")
                    raise EpisodeAborted(Outcome.BUDGET_EXHAUSTED, _BROKE[answer].format(run=run))
                if answer is PermitAnswer.OVER:
                    raise episode_over(episode_id)
                left = ends - time.monotonic()
                if answer is PermitAnswer.OVERDUE or left <= 0:
                    raise EpisodeAborted(Outcome.ADMISSION_TIMEOUT, f"no permit within {wait_seconds:g} s of waiting")
                self._redis.blpop([Keys.wake(episode_id)], timeout=min(max(left, 0.01), BLOCK_SECONDS))

    def ask(
        self, episode_id: str, *, reservation_id: str | None, patience_seconds: float = _PATIENCE_SECONDS
    ) -> PermitAnswer:
        """Ask once for a permit: the step that `admit` repeats.

        It is told to wait, or for want of money to step back, for `patience_seconds` in all attempts at most.
        """
        keys = [
            Keys.PERMITS,
            Keys.WAITERS,
            Keys.WAITERS_SEEN,
            Keys.LIMITS,
            Keys.RESERVATIONS,
            Keys.SLOTS,
            Keys.wake(episode_id),
            Keys.episode(episode_id),
            Keys.BATCHES,
            Keys.PLACES,
            Keys.CREATORS,
            Keys.CREATORS_DUE,
            Keys.BUDGET,
            Keys.SIZES,
            Keys.STEPPED_BACK,
        ]
        limit = self._defaults.concurrency_limit
        args: list[str | int | float] = [episode_id, reservation_id or "", limit, int(1000 * patience_seconds)]
        rates, size = self._rates, self._rates.assumed
        args += [Keys.WAKE_PREFIX, Keys.BUDGET_PREFIX, rates.vcpu_picousd, rates.gib_picousd]
        args += [f"{size.vcpus}:{size.memory_mb}"]
        return PermitAnswer(self._scripts.run("acquire_permit", keys, args))

    @contextmanager
    def _leaving(self, name: str, reservation_id: str | None = None) -> Iterator[None]:
        """Give up the place in line and what was reserved when the wait fails; without Redis both end by themselves."""
        with ExitStack() as undo:
            undo.callback(self._give_up, name, reservation_id)
            yield
            undo.pop_all()

    def _give_up(self, name: str, reservation_id: str | None) -> None:
        with suppress(RedisError):
            self.leave(name)
            if reservation_id is not None:
                self.release_reservation(reservation_id)

    def leave(self, name: str) -> None:
        """Give up a place in line, of an episode or of a batch."""
        keys = [Keys.WAITERS, Keys.WAITERS_SEEN, Keys.BATCHES, Keys.STEPPED_BACK, Keys.wake(name)]
        self._scripts.run("leave_line", keys, [name, Keys.WAKE_PREFIX])

    def creation(self, episode_id: str, role: Role, *, settling: bool = False) -> Creation:
        """A new sandbox's way through the line of those who create; `settling` repeats one, first and after the end."""
        return Creation(self._redis, self._scripts, self._defaults, episode_id, role, settling=settling)

    def note(self, error: RateLimited | ConcurrencyLimited) -> float:
        """Remember a 429 that answered another call than a creation; seconds until the shared pause ends.

        Only a creation can be one too many: without a header it is of the rate kind all the same.
        """
        if isinstance(error, ConcurrencyLimited):
            error = RateLimited(str(error))
        pause_ms, _ = report(self._scripts, self._defaults, error, None)
        return pause_ms / 1000

    def read(self) -> LimiterReading:
        """Everything the limiter knows, in one look."""
        keys = [
            Keys.LIMITS,
            Keys.PERMITS,
            Keys.WAITERS,
            Keys.RESERVATIONS,
            Keys.CREATORS,
            Keys.PLACES,
            Keys.COUNTERS,
            Keys.BATCHES,
            Keys.STEPPED_BACK,
            Keys.WAITERS_SEEN,
        ]
        text = self._scripts.run("read_limits", keys, [self._defaults.concurrency_limit, self._defaults.creation_rate])
        return LimiterReading(**json.loads(text))

    def change(self, *, concurrency: int | None = None, rate: float | None = None, reset: bool = False) -> None:
        """Set limits for every process at once, over their settings; `reset` first forgets what was set and learned.

        A lowered limit lets running episodes finish, a raised one wakes who waits. Raises SettingsError for a value
        that no setting could have.
        """
        if concurrency is not None and not 1 <= concurrency <= HIGHEST_CONCURRENCY:
            raise SettingsError(f"a concurrency limit is 1 to {HIGHEST_CONCURRENCY}, got {concurrency}")
        if rate is not None and rate != 0 and not LOWEST_RATE <= rate <= HIGHEST_RATE:
            allowed = f"0 (no limit of ours) or {LOWEST_RATE} to {HIGHEST_RATE} a second"
            raise SettingsError(f"a creation rate is {allowed}, got {rate:g}")
        self._scripts.run(
            "change_limits",
            [Keys.LIMITS, Keys.WAITERS, Keys.CREATORS, Keys.BATCHES],
            [
                "" if concurrency is None else concurrency,
                "" if rate is None else rate,
                int(reset),
                Keys.WAKE_PREFIX,
            ],
        )

    def capacity(self, queue: str = "") -> Capacity:
        """What could be admitted now, of one queue's episodes or of all."""
        keys = [Keys.PERMITS, Keys.LIMITS, Keys.RESERVATIONS, Keys.SLOTS]
        args: list[str | int | float] = [self._defaults.concurrency_limit, queue, Keys.worker(""), Keys.episode("")]
        return Capacity(*self._scripts.run("read_capacity", keys, args))

    def reserve(
        self,
        reservation_id: str,
        count: int,
        *,
        life_seconds: float,
        wait_seconds: float = 0.0,
        patience_seconds: float = _PATIENCE_SECONDS,
        queue: str = "",
    ) -> bool:
        """Reserve `count` places at once or none, waiting in line for them; False when they were not free in time.

        An episode that stepped back keeps its place before the batch for `patience_seconds` at most. Its places
        are slots of `queue`, '' for any. Raises NeverFits when so many can never be live together.
        """
        ends, name = time.monotonic() + wait_seconds, _in_line(reservation_id, count)
        with self._leaving(name, reservation_id):
            while True:
                left = ends - time.monotonic()
                if self.ask_places(
                    reservation_id,
                    count,
                    life_seconds=life_seconds,
                    stays=left > 0,
                    patience_seconds=patience_seconds,
                    queue=queue,
                ):
                    return True
                if left <= 0:
                    return False
                self._redis.blpop([Keys.wake(name)], timeout=min(max(left, 0.01), BLOCK_SECONDS))  # less: for ever

    def ask_places(
        self,
        reservation_id: str,
        count: int,
        *,
        life_seconds: float,
        stays: bool,
        patience_seconds: float = _PATIENCE_SECONDS,
        queue: str = "",
    ) -> bool:
        """Ask once for a batch's places: the step that `reserve` repeats; one that `stays` keeps its place in line."""
        name = _in_line(reservation_id, count)
        keys = [
            Keys.PERMITS,
            Keys.LIMITS,
            Keys.RESERVATIONS,
            Keys.SLOTS,
            Keys.WAITERS,
            Keys.WAITERS_SEEN,
            Keys.BATCHES,
            Keys.STEPPED_BACK,
            Keys.wake(name),
        ]
        args: list[str | int | float] = [self._defaults.concurrency_limit, reservation_id, count]
        args += [int(life_seconds * 1000), int(stays), name, Keys.WAKE_PREFIX, int(patience_seconds * 1000)]
        args += [queue, Keys.worker(""), Keys.episode("")]
        fits, slots, configured = self._scripts.run("reserve_batch", keys, args)
        if not fits and (slots < count or configured < count):
            raise NeverFits(_never_fits(count, slots, configured))
        return bool(fits)

    def drop_dead_creators(self) -> int:
        """Take those whose process is gone out of the line of creations; how many there were."""
        keys = [Keys.LIMITS, Keys.CREATORS, Keys.CREATORS_DUE]
        return int(self._scripts.run("drop_creators", keys, [Keys.WAKE_PREFIX]))

    def renew_reservation(self, reservation_id: str) -> bool:
        """Let a reservation last for its whole life from now on; False when nothing is left of it."""
        return bool(self._scripts.run("renew_reservation", [Keys.RESERVATIONS], [reservation_id]))

    def release_reservation(self, reservation_id: str) -> None:
        """Give back what is left of a reservation, and wake whoever is first in line."""
        keys = [Keys.RESERVATIONS, Keys.WAITERS, Keys.BATCHES]
        self._scripts.run("release_reservation", keys, [reservation_id, Keys.WAKE_PREFIX])


_BROKE = {
    PermitAnswer.RUN_BUDGET: "the run's budget cannot pay for another episode; see it: rollout-farm budget --run {run}",
    PermitAnswer.FARM_BUDGET: "the farm's budget cannot pay for another episode; see it: rollout-farm budget",
}


def _in_line(reservation_id: str, count: int) -> str:
    """What a batch is called in line: whoever looks at that sees what it waits for."""
    return f"{count}:{reservation_id}"


def _never_fits(count: int, slots: int, limit: int) -> str:
    wants = []
    if slots < count:
        workers = -(-(count - slots) // SLOTS_PER_WORKER)
        each = f"{SLOTS_PER_WORKER} slots each"
        wants.append(f"{slots} slots are live: add {workers} worker{'s' if workers > 1 else ''} ({each})")
    if limit < count:
        live = f"while the farm runs: rollout-farm limits --concurrency {count}"
        wants.append(f"the concurrency limit is {limit}: raise FARM_CONCURRENCY_LIMIT to {count} ({live})")
    return f"a batch of {count} can never be live at once; " + "; ".join(wants) + "; or make the batch smaller"


def _sleep(seconds: float, check: Callable[[], None]) -> None:
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        check()
        time.sleep(min(left, 1.0))
