"""10,000 episodes against a simulated provider, at 1,100 sandboxes at once, without sleeping.

What is simulated: the provider, the slots and the time. What is real: the limiter's own decisions, its scripts on a
real Redis, given the simulation's clock in place of Redis's (scripts/__init__.py), and the ledger's rows, leases and
receipts. An event is a step of one episode: ask for the permit, ask for leave to create, hear the provider's answer,
delete, write the receipt. A slot that waits asks again when it is woken or when its sleep is over, as the limiter's own
loops do. One episode in a hundred loses its process: it says nothing any more, and is finished after the lease time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis

from orchestrator.connection import BLOCK_SECONDS
from orchestrator.creations import Creation
from orchestrator.errors import ConcurrencyLimited, RateLimited
from orchestrator.keys import Keys
from orchestrator.ledger import Lease, Ledger
from orchestrator.limiter import Answer, Limiter
from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import Outcome, Role
from tests.bench.rows import Goal, Row
from tests.support.redis_server import running_redis
from tests.support.truth import a_receipt, a_spec, farm_of, farm_settings, leased

_EPISODES = 10_000
_LEARNING_EPISODES = 4_000
_SLOTS = 1_130
"""A few more than may run, so that somebody always waits."""
_LIFE_SECONDS = {Role.POLICY: (300.0, 900.0), Role.VERIFIER: (30.0, 90.0)}
"""Long enough for five creations a second to keep 1,100 alive, so that the cap is what binds: 3.3 a second do."""
_ANSWER_SECONDS = {"create": (0.1, 0.3), "delete": (0.05, 0.15)}
_LEASE_SECONDS = 12.0
_DEATHS = 0.01

Leased = tuple[EpisodeSpec, Lease]


class Provider:
    """A token bucket, a cap, and what the provider would write in its log."""

    def __init__(self, *, rate: float, burst: int, cap: int) -> None:
        self._rate, self._burst, self.cap = rate, burst, cap
        self._tokens, self._at = float(burst), 0.0
        self.running = 0
        self.highest = 0
        self.created = 0
        self.refused = 0
        self._since, self._sum = 0.0, 0.0
        self.full_at: tuple[float, float] | None = None
        """When the cap was first reached, and at how many sandbox seconds."""

    def create(self, now: float) -> RateLimited | ConcurrencyLimited | None:
        """A sandbox, or why not."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            self.refused += 1
            return RateLimited("slow down", max(1, math.ceil((1 - self._tokens) / self._rate)))
        if self.running >= self.cap:
            self.refused += 1
            return ConcurrencyLimited(f"{self.cap} are running")
        self._tokens -= 1
        self.created += 1
        self._count(now, 1)
        return None

    def delete(self, now: float) -> None:
        """One is gone."""
        self._count(now, -1)

    def _count(self, now: float, change: int) -> None:
        self._sum += self.running * (now - self._since)
        self._since = now
        self.running += change
        self.highest = max(self.highest, self.running)
        if self.full_at is None and self.running == self.cap:
            self.full_at = (now, self._sum)

    def area(self, now: float) -> float:
        """Sandbox seconds so far."""
        return self._sum + self.running * (now - self._since)


@dataclass
class World:
    """The clock, the events, and the farm on a real Redis."""

    redis: Redis
    provider: Provider
    concurrency: int
    rate: float
    dice: random.Random
    now: float = 0.0
    begun: int = 0
    finished: int = 0
    dead: int = 0
    most_permits: int = 0
    last_begun_at: tuple[float, float] | None = None
    """When the last episode began, and at how many sandbox seconds."""
    asking: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Who waits, by the name under which it is woken, and how it goes on."""
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        """Let something happen later."""
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), then))

    def wait(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        """Go on when woken, or by oneself."""

        def alone() -> None:
            if self.asking.get(name) is then:
                del self.asking[name]
                then()

        self.asking[name] = then
        self.after(seconds, alone)

    def wake(self) -> None:
        """Let those go on whom the last script woke: scripts wake the first of a line."""
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.zrange(Keys.WAITERS, 0, 0)
        pipeline.zrange(Keys.CREATORS, 0, 0)
        pipeline.zcard(Keys.PERMITS)
        waiters, creators, permits = pipeline.execute()
        self.most_permits = max(self.most_permits, permits)
        for name in (*waiters, *creators):
            if self.redis.delete(Keys.wake(name)) and (then := self.asking.pop(name, None)) is not None:
                self.after(0.0, then)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self.events:
            at, _, then = heapq.heappop(self.events)
            self.now = max(self.now, at)
            then()


def simulation() -> list[Row]:
    """Rows of two farms: one that knows the provider's limits, one that has to find them out."""
    known = simulate(concurrency=1100, rate=5)
    learned = simulate(concurrency=1200, rate=10, episodes=_LEARNING_EPISODES)
    return [
        *_rows("limits known", known, Goal(">=", 98)),
        *_rows("configured 1,200 and 10 a second", learned, None),
    ]


def simulate(
    *, concurrency: int, rate: float, episodes: int = _EPISODES, slots: int = _SLOTS, cap: int = 1100
) -> World:
    """Run all of them; raises RuntimeError when an invariant is broken."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, running_redis(Path(name)) as url:
        with farm_of(farm_settings(url, concurrency_limit=concurrency, creation_rate=rate)) as farm:
            world = World(farm.redis, Provider(rate=5, burst=5, cap=cap), concurrency, rate, random.Random(7))
            epoch = int(farm.ledger.now() * 1000)
            limiter = Limiter(
                farm.redis,
                concurrency_limit=concurrency,
                creation_rate=rate,
                clock_ms=lambda: epoch + int(world.now * 1000),
            )

            def begin() -> None:
                if world.begun < episodes:
                    world.begun += 1
                    if world.begun == episodes:
                        world.last_begun_at = (world.now, world.provider.area(world.now))
                    episode = leased(farm, a_spec(f"e-{world.begun}"))
                    _Episode(world, limiter, farm.ledger, episode, begin).admit()

            for _ in range(slots):
                world.after(0.0, begin)
            world.run()
            _check(world, episodes)
        return world


class _Episode:
    """One episode's steps."""

    def __init__(
        self, world: World, limiter: Limiter, ledger: Ledger, episode: Leased, then: Callable[[], None]
    ) -> None:
        self._world, self._limiter, self._ledger = world, limiter, ledger
        self._spec, self._lease = episode
        self._then = then
        self._owns = False
        self._dies_at = world.dice.randrange(6) if world.dice.random() < _DEATHS else -1
        self._steps = 0
        self._roles = iter((Role.POLICY, Role.VERIFIER))

    def admit(self) -> None:
        if self._dies():
            return
        answer = self._limiter.ask(self._spec.episode_id, reservation_id=None)
        self._world.wake()
        if answer is Answer.GRANTED:
            self._create(next(self._roles))
        elif answer is Answer.WAIT:
            self._world.wait(self._spec.episode_id, BLOCK_SECONDS, self.admit)
        else:
            raise RuntimeError(f"{self._spec.episode_id}: {answer}")

    def _create(self, role: Role) -> None:
        creation = self._limiter.creation(self._spec.episode_id, role)
        self._ask(creation, role)

    def _ask(self, creation: Creation, role: Role) -> None:
        if self._dies():
            return
        turn = creation.ask(100_000)
        if turn.state == "granted":
            self._world.wake()  # only who is let through wakes another
            self._world.after(self._seconds("create") / 2, lambda: self._arrive(creation, role))
        elif turn.state == "wait":
            self._world.wait(creation.creation_id, turn.wait_seconds, lambda: self._ask(creation, role))
        else:
            raise RuntimeError(f"{self._spec.episode_id}: {turn}")

    def _arrive(self, creation: Creation, role: Role) -> None:
        refusal = self._world.provider.create(self._world.now)
        self._owns = refusal is None
        self._world.after(self._seconds("create") / 2, lambda: self._hear(creation, role, refusal))

    def _hear(self, creation: Creation, role: Role, refusal: RateLimited | ConcurrencyLimited | None) -> None:
        if self._dies():
            return
        if refusal is None:
            self._world.after(self._world.dice.uniform(*_LIFE_SECONDS[role]), self._delete)
            return
        rest = creation.refused(refusal)
        self._world.wake()
        creation.begin()
        self._world.after(rest, lambda: self._ask(creation, role))

    def _delete(self) -> None:
        if self._dies():
            return
        self._world.provider.delete(self._world.now)
        self._owns = False
        self._world.after(self._seconds("delete"), self._confirmed)

    def _confirmed(self) -> None:
        role = next(self._roles, None)
        if role is not None:
            self._create(role)
        else:
            self._end(Outcome.SOLVED)

    def _end(self, outcome: Outcome) -> None:
        self._ledger.commit(a_receipt(self._spec, outcome), self._lease.token)
        self._world.finished += 1
        self._world.wake()
        self._then()

    def _dies(self) -> bool:
        """Whether the process is gone from here on; somebody else finishes the episode then."""
        self._steps += 1
        if self._steps - 1 != self._dies_at:
            return False
        self._world.dead += 1
        self._world.after(_LEASE_SECONDS, self._found_dead)
        return True

    def _found_dead(self) -> None:
        if self._owns:
            self._world.provider.delete(self._world.now)
        self._end(Outcome.WORKER_LOST)

    def _seconds(self, call: str) -> float:
        return self._world.dice.uniform(*_ANSWER_SECONDS[call])


def _check(world: World, episodes: int) -> None:
    redis = world.redis
    facts = {
        "one receipt each": redis.zcard(Keys.RECEIPTS) == world.finished == episodes,
        "no open row": redis.zcard(Keys.OPEN) == 0,
        "never more permits than the limit": world.most_permits <= world.concurrency,
        "never more sandboxes than the limit": world.provider.highest <= min(world.concurrency, world.provider.cap),
        "no permit left": redis.zcard(Keys.PERMITS) == redis.zcard(Keys.PLACES) == 0,
        "no sandbox left": world.provider.running == 0,
        "nobody in line": redis.zcard(Keys.WAITERS) == 0,
    }
    if broken := [fact for fact, holds in facts.items() if not holds]:
        raise RuntimeError(f"broken: {broken}")


def _rows(what: str, world: World, goal: Goal | None) -> list[Row]:
    seen, last, full = world.provider, world.last_begun_at, world.provider.full_at
    if last is None or full is None:
        raise RuntimeError(f"never more than {seen.highest} of {seen.cap} sandboxes at once")
    seconds = last[0] - full[0]
    mean = (last[1] - full[1]) / seconds
    return [
        Row(
            f"simulated, {what}: of {seen.cap} sandboxes",
            100 * mean / seen.cap,
            "%",
            goal,
            f"mean over {seconds / 3600:.1f} simulated hours, from the first time at the cap ({full[0]:.0f} s after "
            f"the start) to the last episode's beginning; highest {seen.highest}; {world.finished} receipts, "
            f"{world.dead} for processes that died; "
            "every invariant held",
        ),
        Row(
            f"simulated, {what}: refused",
            100 * seen.refused / (seen.created + seen.refused),
            "%",
            None,
            f"{seen.created} created, {seen.refused} refused; bucket of 5 a second that holds 5",
        ),
    ]
