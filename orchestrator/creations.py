"""Who may create a sandbox now, over all processes and hosts: the line, the shared rate, and what a 429 does to both.

What always holds: verifiers go before policies, each class first come, first served; a refusal keeps its place in the
line; an episode takes a place at the provider with its first creation and keeps it until its permit is freed, and no
more places are taken than the concurrency limit in force; asking again under one id changes nothing.

Why a line in Redis and not booked times: nobody owns a future moment, so there is nothing to move when a verifier comes
in before a thousand policies, when a rate changes, when a 429 pauses everybody or when a process dies. Each waiter is
told when its turn should come, sleeps until then and asks again. That estimate may be wrong: early, it costs one more
question; late, whoever is let through or leaves wakes the next. A process that died is passed over a quarter of a
second after its turn. There is no clerk who hands out turns: a clerk can die too.
A stream of verifiers starves no policy: each one's episode created its policy sandbox first.

All decisions are Lua, in scripts/_limits.lua, take_creation.lua and report_limited.lua: they read and write what every
process shares, and a copy in Python would be a second truth.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from redis import Redis

from orchestrator.errors import ConcurrencyLimited, EpisodeAborted, LeaseLost, RateLimited
from orchestrator.keys import Keys
from orchestrator.scripts import Scripts
from orchestrator.vocabulary import Outcome, Role

_LONGEST_SLEEP_SECONDS = 2.0
"""A waiter looks whether its episode still goes on at least this often."""

_BLOCKING_IS_LATE_SECONDS = 0.15
"""A blocking pop ends up to a tenth of a second late (the server's timer): the rest of a wait is slept here."""


@dataclass(frozen=True)
class Defaults:
    """Limits that hold until others are set while the farm runs; `creation_rate` is a second, 0 for none."""

    concurrency_limit: int
    creation_rate: float


State = Literal["wait", "granted", "too_far", "over", "never"]
_STATES: tuple[State, ...] = ("wait", "granted", "too_far", "over", "never")
"""In the order of take_creation.lua's numbers."""


@dataclass(frozen=True)
class Turn:
    """What the line answered."""

    state: State
    wait_seconds: float = 0.0
    """Until it should ask again, or until its turn when that is too far away."""


class Creation:
    """One sandbox's way through the line, with all its attempts. Made by `Limiter.creation`."""

    def __init__(
        self,
        redis: Redis,
        scripts: Scripts,
        defaults: Defaults,
        episode_id: str,
        role: Role,
        *,
        settling: bool = False,
    ) -> None:
        self._redis = redis
        self._scripts = scripts
        self._defaults = defaults
        self._episode_id = episode_id
        self._class = 0 if settling else 1 if role is Role.VERIFIER else 2
        self._arrival = ""
        self._refusals = 0
        self.begin()

    def wait(self, *, wait_seconds: float, check: Callable[[], None]) -> None:
        """Return when one attempt may be sent; a new attempt goes on from the old one's place in line.

        `check` is called now and then and may raise to give up. Raises EpisodeAborted(deadline) as soon as the turn
        lies beyond `wait_seconds`, EpisodeAborted(admission_timeout) when the limit fell below its batch's reservation,
        LeaseLost when the episode has ended or is unknown.
        """
        self.begin()
        ends = time.monotonic() + wait_seconds
        try:
            while True:
                left = ends - time.monotonic()
                turn = self.ask(max(0.0, left))
                if turn.state == "granted":
                    return
                if turn.state == "over":
                    raise episode_over(self._episode_id)
                if turn.state == "never":
                    raise limit_fell()
                if turn.state == "too_far" or left <= 0:
                    away = f"the next creation is {turn.wait_seconds:.1f} s away" if left > 0 else "no place was free"
                    raise EpisodeAborted(Outcome.DEADLINE, away)
                self._sleep(min(turn.wait_seconds, max(left, 0.001)))
                check()
        except BaseException:
            self.leave()
            raise

    def ask(self, longest_seconds: float) -> Turn:
        """Ask once: the step that `wait` repeats."""
        keys = [
            Keys.LIMITS,
            Keys.CREATORS,
            Keys.CREATORS_DUE,
            Keys.PLACES,
            Keys.COUNTERS,
            Keys.episode(self._episode_id),
            Keys.creation(self.creation_id),
            Keys.wake(self.creation_id),
            Keys.PERMITS,
        ]
        args: list[str | int | float] = [
            self.creation_id,
            self._episode_id,
            self._class,
            self._arrival,
            self._defaults.creation_rate,
            self._defaults.concurrency_limit,
            int(longest_seconds * 1000),
            int(_LONGEST_SLEEP_SECONDS * 1000),
            Keys.WAKE_PREFIX,
        ]
        state, arrival, *wait_ms = self._scripts.run("take_creation", keys, args)
        self._arrival = str(arrival)
        return Turn(_STATES[state], wait_ms[0] / 1000 if wait_ms else 0.0)

    def leave(self) -> None:
        """Give up the place in line."""
        keys = [Keys.LIMITS, Keys.CREATORS, Keys.CREATORS_DUE, Keys.wake(self.creation_id)]
        self._scripts.run("leave_creators", keys, [self.creation_id, Keys.WAKE_PREFIX])

    def refused(self, error: RateLimited | ConcurrencyLimited) -> float:
        """Tell everybody that this attempt was answered 429; seconds to rest before `wait` is called again."""
        _, rest_ms = report(self._scripts, self._defaults, error, self)
        self._refusals += isinstance(error, ConcurrencyLimited)
        return rest_ms / 1000

    @property
    def episode_id(self) -> str:
        """Whose sandbox it is."""
        return self._episode_id

    @property
    def refusals(self) -> int:
        """How often a concurrency 429 refused it."""
        return self._refusals

    def begin(self) -> None:
        """Begin another attempt; it goes on from this one's place in line."""
        self.creation_id = f"c-{secrets.token_hex(8)}"

    def _sleep(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        blocked = seconds - _BLOCKING_IS_LATE_SECONDS
        if blocked > 0.05 and self._redis.blpop([Keys.wake(self.creation_id)], timeout=blocked):
            return
        time.sleep(max(0.0, ends - time.monotonic()))


def episode_over(episode_id: str) -> LeaseLost:
    """What an episode hears that asks for a permit or a creation after its end."""
    return LeaseLost(f"{episode_id}: it has its receipt, or the farm lost it")


def limit_fell() -> EpisodeAborted:
    """What a reserved episode hears whose batch can no longer be live at once."""
    return EpisodeAborted(Outcome.ADMISSION_TIMEOUT, "the concurrency limit fell below the batch's reservation")


def report(
    scripts: Scripts, defaults: Defaults, error: RateLimited | ConcurrencyLimited, creation: Creation | None
) -> tuple[int, int]:
    """Remember a 429; (ms until the shared pause ends, ms to rest), of a creation or of another call."""
    rate = isinstance(error, RateLimited)
    after = error.retry_after_seconds if isinstance(error, RateLimited) else None
    # never an empty key: a user of Redis who may touch the farm's keys only would be refused
    leave = Keys.creation(creation.creation_id if creation else "none")
    args: list[str | int | float] = [
        "rate" if rate else "concurrency",
        "" if after is None else int(after * 1000),
        random.uniform(0.75, 1.25),
        creation.episode_id if creation else "",
        defaults.creation_rate,
        defaults.concurrency_limit,
        creation.refusals if creation else 0,
    ]
    pause_ms, rest_ms = scripts.run("report_limited", [Keys.LIMITS, Keys.COUNTERS, leave, Keys.PLACES], args)
    return pause_ms, rest_ms
