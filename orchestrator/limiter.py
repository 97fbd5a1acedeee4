"""Who may hold a sandbox and who may create one now, over all processes and hosts; atomic, in Redis time.

What always holds: an episode has at most one permit, and holds it until its sandboxes are confirmed absent; waiters
block on a list of their own and are woken by the release that frees their place, so nobody polls hot; what is reserved
for a batch is granted to nobody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import cast

from redis import Redis

from orchestrator.connection import BLOCK_SECONDS
from orchestrator.errors import CapacityError, ConcurrencyLimited, EpisodeAborted, LeaseLost, RateLimited
from orchestrator.keys import Keys
from orchestrator.scripts import Scripts
from orchestrator.vocabulary import Outcome

_PATIENCE_MS = 3 * BLOCK_SECONDS * 1000
"""A waiter that has not asked for this long is taken out of the line: its process is gone."""

_RATE_PAUSE_SECONDS = 1.0
"""Shared pause after a rate 429 that named no Retry-After."""

_CONCURRENCY_PAUSE_SECONDS = 1.0
"""One caller's pause after a concurrency 429: the provider's count lags a deletion by about this much."""


_STEP_BACK_SECONDS = 1.0
"""How long an episode without reservation keeps its slot from a reserved batch, so that it does not circle hot."""


class Admission(Enum):
    """What the limiter says to an episode."""

    GRANTED = auto()
    STEP_BACK = auto()
    """Everything free is reserved for others: leave the slot to them and come back."""


@dataclass(frozen=True)
class Capacity:
    """What could be admitted now."""

    live_slots: int
    concurrency_limit: int
    permits: int
    reserved: int

    @property
    def free(self) -> int:
        """min(live slots, concurrency limit) minus what is admitted or reserved."""
        return max(0, min(self.live_slots, self.concurrency_limit) - self.permits - self.reserved)


class Limiter:
    """The farm's limiter; defaults apply until `farm:limits` says otherwise."""

    def __init__(self, redis: Redis, *, concurrency_limit: int, creation_rate: float) -> None:
        self._redis = redis
        self._scripts = Scripts(redis)
        self._concurrency = concurrency_limit
        self._rate = creation_rate

    def admit(
        self,
        episode_id: str,
        *,
        reservation_id: str | None,
        wait_seconds: float,
        check: Callable[[], None],
    ) -> Admission:
        """Wait in line for a permit; `check` is called now and then and may raise to give up.

        Raises EpisodeAborted(admission_timeout) when `wait_seconds` have passed, or when the limit has fallen below
        the batch's reservation; LeaseLost when the episode has ended meanwhile.
        """
        ends = time.monotonic() + wait_seconds
        stepped_back = False
        keys = [
            Keys.PERMITS,
            Keys.WAITERS,
            Keys.WAITERS_SEEN,
            Keys.LIMITS,
            Keys.RESERVATIONS,
            Keys.SLOTS,
            Keys.wake(episode_id),
            Keys.episode(episode_id),
            Keys.RESERVING,
        ]
        try:
            while True:
                check()
                answer = self._scripts.run(
                    "acquire_permit",
                    keys,
                    [episode_id, reservation_id or "", self._concurrency, _PATIENCE_MS, Keys.WAKE_PREFIX],
                )
                if answer == 1:
                    return Admission.GRANTED
                if answer == 2:
                    self.leave(episode_id)  # at once: whoever waits behind it has to be told too
                    if stepped_back:
                        return Admission.STEP_BACK
                    stepped_back = True
                    _sleep(_STEP_BACK_SECONDS, check)
                    continue
                if answer == 3:
                    raise EpisodeAborted(
                        Outcome.ADMISSION_TIMEOUT, "the concurrency limit fell below the batch's reservation"
                    )
                if answer == 4:
                    raise LeaseLost(f"{episode_id}: it has its receipt already")
                left = ends - time.monotonic()
                if left <= 0:
                    raise EpisodeAborted(Outcome.ADMISSION_TIMEOUT, f"no permit within {wait_seconds:g} s of waiting")
                self._redis.blpop([Keys.wake(episode_id)], timeout=min(max(left, 0.01), BLOCK_SECONDS))
        except BaseException:
            self.leave(episode_id)
            raise

    def leave(self, episode_id: str) -> None:
        """Give up a place in line."""
        keys = [Keys.WAITERS, Keys.WAITERS_SEEN, Keys.wake(episode_id)]
        self._scripts.run("leave_line", keys, [episode_id, Keys.WAKE_PREFIX])

    def wait_to_create(self, *, wait_seconds: float, check: Callable[[], None]) -> None:
        """Book a place in the creation bucket and sleep until it has come.

        Raises EpisodeAborted(deadline) when that lies beyond `wait_seconds`.
        """
        ends = time.monotonic() + wait_seconds
        while True:
            longest_ms = max(0, int((ends - time.monotonic()) * 1000))
            wait_ms = self._scripts.run("take_creation", [Keys.LIMITS], [self._rate, longest_ms])
            if wait_ms <= 0:
                return
            if wait_ms > longest_ms:
                raise EpisodeAborted(Outcome.DEADLINE, f"the next creation is {wait_ms / 1000:.1f} s away")
            _sleep(wait_ms / 1000, check)
            if self._cooldown_ms() <= 0:  # else a 429 paused everybody: book again, or all come at its end together
                return

    def report(self, error: RateLimited | ConcurrencyLimited) -> float:
        """Remember a 429 for everybody; returns the seconds this caller should wait before it tries again."""
        if isinstance(error, ConcurrencyLimited):
            self._scripts.run("report_limited", [Keys.LIMITS, Keys.COUNTERS], ["concurrency", 0])
            return _CONCURRENCY_PAUSE_SECONDS
        pause = error.retry_after_seconds if error.retry_after_seconds is not None else _RATE_PAUSE_SECONDS
        left = self._scripts.run("report_limited", [Keys.LIMITS, Keys.COUNTERS], ["rate", int(pause * 1000)])
        return float(left) / 1000

    def capacity(self) -> Capacity:
        """What could be admitted now."""
        keys = [Keys.PERMITS, Keys.LIMITS, Keys.RESERVATIONS, Keys.SLOTS]
        return Capacity(*self._scripts.run("read_capacity", keys, [self._concurrency]))

    def reserve(self, reservation_id: str, count: int, *, life_seconds: float, asks_again: bool = False) -> bool:
        """Reserve `count` places at once or none; False when they are not free now.

        A caller that `asks_again` within two seconds keeps its turn: places that become free are kept for it.
        Raises CapacityError when they never could be.
        """
        keys = [Keys.PERMITS, Keys.LIMITS, Keys.RESERVATIONS, Keys.SLOTS, Keys.RESERVING]
        args: list[str | int | float] = [self._concurrency, reservation_id, count, int(life_seconds * 1000)]
        args.append(int(asks_again))
        fits, slots, limit, _, _ = self._scripts.run("reserve_batch", keys, args)
        if not fits and (slots < count or limit < count):
            raise CapacityError(_never_fits(count, slots, limit))
        return bool(fits)

    def release_reservation(self, reservation_id: str) -> None:
        """Give back what is left of a reservation, and wake whoever is first in line."""
        self._redis.hdel(Keys.RESERVATIONS, reservation_id)
        for first in cast("list[str]", self._redis.zrange(Keys.WAITERS, 0, 0)):
            self._redis.lpush(Keys.wake(first), "1")
            self._redis.expire(Keys.wake(first), 60)

    def _cooldown_ms(self) -> int:
        until = self._redis.hget(Keys.LIMITS, "cooldown_until")
        seconds, micros = self._redis.time()
        return int(cast(str, until or "0")) - (seconds * 1000 + micros // 1000)


def _never_fits(count: int, slots: int, limit: int) -> str:
    wants = []
    if slots < count:
        workers = -(-(count - slots) // 2)
        wants.append(f"{slots} slots are live: add {workers} worker{'s' if workers > 1 else ''} (two slots each)")
    if limit < count:
        wants.append(f"the concurrency limit is {limit}: raise FARM_CONCURRENCY_LIMIT to {count}")
    return f"a batch of {count} can never be live at once; " + "; ".join(wants) + "; or make the batch smaller"


def _sleep(seconds: float, check: Callable[[], None]) -> None:
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        check()
        time.sleep(min(left, 1.0))
