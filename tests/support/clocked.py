"""A limiter whose scripts see a clock of the test's own: the same scripts on the same Redis, without waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from redis import Redis

from orchestrator.creations import Creation, Turn
from orchestrator.errors import ConcurrencyLimited, RateLimited
from orchestrator.limiter import Limiter
from orchestrator.vocabulary import Role
from tests.support.bare_farm import run_episode


def age_by_step(redis: Redis, key: str, seconds: float = 3600) -> None:
    """Leave a key as a step back of Redis's own clock leaves it: what it noted lies that much further ahead.

    Its end, the scores of a sorted set, a hash's fields named `..._at`.
    """
    ms = round(seconds * 1000)
    if (left := redis.pttl(key)) > 0:
        redis.pexpire(key, left + ms)
    match redis.type(key):
        case "zset":
            for member in cast("list[str]", redis.zrange(key, 0, -1)):
                redis.zincrby(key, ms, member)
        case "hash":
            for name in cast("list[str]", redis.hkeys(key)):
                if name.endswith("_at"):
                    redis.hincrby(key, name, ms)


@dataclass
class Clocked:
    """`now` is in ms; `pass_seconds` moves it."""

    redis: Redis
    concurrency_limit: int = 1000
    creation_rate: float = 0.0
    now: int = 1_000_000_000
    numbers: int = 0
    limiter: Limiter = field(init=False)

    def __post_init__(self) -> None:
        self.limiter = Limiter(
            self.redis,
            concurrency_limit=self.concurrency_limit,
            creation_rate=self.creation_rate,
            clock_ms=lambda: self.now,
        )

    def pass_seconds(self, seconds: float) -> None:
        self.now += round(seconds * 1000)

    def new(self, role: Role = Role.POLICY, *, episode_id: str | None = None) -> Creation:
        self.numbers += 1
        name = episode_id or f"e-{self.numbers}"
        run_episode(self.redis, name)
        return self.limiter.creation(name, role)

    def let_through(self, count: int = 1) -> list[Creation]:
        """So many creations, each as soon as it may be."""
        made = []
        for _ in range(count):
            creation = self.new()
            while (turn := creation.ask(1000)).state == "wait":
                self.now += max(1, round(turn.wait_seconds * 1000))
            assert turn.state == "granted"
            made.append(creation)
        return made

    def ask(self, creation: Creation) -> Turn:
        return creation.ask(1000)

    def refuse_rate(self, creation: Creation, seconds: float | None = 1.0) -> float:
        """A rate 429, then a new attempt; how long everybody pauses."""
        creation.refused(RateLimited("slow down", seconds))
        return self.limiter.read().cooldown_seconds

    def refuse_concurrency(self, creation: Creation) -> float:
        """A concurrency 429; how long this creation rests by itself."""
        return creation.refused(ConcurrencyLimited("20 are running"))

    @property
    def rate(self) -> float:
        return self.limiter.read().rate_effective

    @property
    def limit(self) -> int:
        return self.limiter.read().concurrency_effective
