"""10,000 episodes against a simulated provider, at 1,100 sandboxes at once, without sleeping.

What is simulated: the provider, the slots and the time. What is real: the limiter's own decisions, its scripts on a
real Redis, given the simulation's clock in place of Redis's (scripts/__init__.py), and the ledger's rows, leases,
allocations and receipts. An event is a step of one episode: ask for the permit, ask for leave to create, hear the
provider's answer, delete, write the receipt. A slot that waits asks again when woken or when its sleep is over, as
the limiter's own loops do. One episode in a hundred loses its process: it says nothing any more, and after the lease
time its lease is seized, its sandbox named under its key, deleted and confirmed, and its receipt written. In the end
the same invariants are checked as after chaos (tests/chaos/invariants.py).
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

from orchestrator.allocations import Allocations
from orchestrator.connection import BLOCK_SECONDS
from orchestrator.creations import Creation
from orchestrator.errors import ConcurrencyLimited, RateLimited
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.ledger import Ledger
from orchestrator.limiter import Limiter, PermitAnswer
from orchestrator.records import Allocation, EpisodeSpec
from orchestrator.rows import Lease
from orchestrator.vocabulary import AllocationState, Outcome, Role
from tests.bench.rows import Goal, Row
from tests.chaos.invariants import violations
from tests.chaos.reading import read
from tests.support.bare_farm import a_receipt, a_request, a_spec, expire, farm_of, farm_settings, leased
from tests.support.redis_server import running_redis

_EPISODES = 10_000
_LEARNING_EPISODES = 4_000
_SLOTS = 1_130
"""A few more than may run, so that somebody always waits."""
_LIFE_SECONDS = {Role.POLICY: (300.0, 900.0), Role.VERIFIER: (30.0, 90.0)}
"""Long enough for five creations a second to keep 1,100 alive, so that the cap is what binds: 3.3 a second do."""
_ANSWER_SECONDS = {"create": (0.1, 0.3), "delete": (0.05, 0.15)}
_PATIENCE_SECONDS = 86_400.0
"""None gives up: where four wait for each permit, that takes longer than a slot's episode would wait."""
_LEASE_SECONDS = 12.0
_DEATHS = 0.01
_LOW_LIMIT = 10
_LOW_EPISODES = 300
_LOW_SLOTS = 40
_VCPUS = 2
_MEMORY_MB = 512

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
    low = simulate(concurrency=_LOW_LIMIT, rate=5, episodes=_LOW_EPISODES, slots=_LOW_SLOTS, cap=1000)
    return [
        *_rows("limits known", known, Goal(">=", 98)),
        *_rows("configured 1,200 and 10 a second", learned, None),
        Row(
            f"simulated, our limit {_LOW_LIMIT}, the provider's 1000: most at once",
            low.provider.highest,
            "",
            Goal("<=", _LOW_LIMIT),
            f"the provider's own count; {low.finished} receipts from {_LOW_SLOTS} slots, every invariant held",
        ),
    ]


def simulate(
    *, concurrency: int, rate: float, episodes: int = _EPISODES, slots: int = _SLOTS, cap: int = 1100
) -> World:
    """Run all of them; raises RuntimeError when an invariant is broken."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, running_redis(Path(name)) as url:
        with farm_of(farm_settings(url, concurrency_limit=concurrency, creation_rate=rate)) as farm:
            world = World(farm.redis, Provider(rate=5, burst=5, cap=cap), concurrency, rate, random.Random(7))
            epoch = int(farm.ledger.now() * 1000)

            def clock_ms() -> int:
                return epoch + int(world.now * 1000)

            life = farm.settings.receipt_retention_seconds
            allocations = Allocations(
                farm.redis, rates=farm.settings.rates(), retention_seconds=life, clock_ms=clock_ms
            )
            ledger = Ledger(farm.redis, allocations, retention_seconds=life, clock_ms=clock_ms)
            limiter = Limiter(farm.redis, concurrency_limit=concurrency, creation_rate=rate, clock_ms=clock_ms)

            def begin() -> None:
                if world.begun < episodes:
                    world.begun += 1
                    if world.begun == episodes:
                        world.last_begun_at = (world.now, world.provider.area(world.now))
                    episode = leased(farm, a_spec(f"e-{world.begun}"))
                    _Episode(world, limiter, ledger, episode, begin).admit()

            for _ in range(slots):
                world.after(0.0, begin)
            world.run()
            _check(world, farm, episodes)
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
        """Whether the provider has a sandbox of this episode."""
        self._row: Allocation | None = None
        """The allocation that is not settled."""
        self._names: list[str] = []
        self._began = 0.0
        self._dies_at = world.dice.randrange(6) if world.dice.random() < _DEATHS else -1
        self._steps = 0
        self._roles = iter((Role.POLICY, Role.VERIFIER))

    def admit(self) -> None:
        if self._dies():
            return
        answer = self._limiter.ask(self._spec.episode_id, reservation_id=None, patience_seconds=_PATIENCE_SECONDS)
        self._world.wake()
        if answer is PermitAnswer.GRANTED:
            self._create(next(self._roles))
        elif answer is PermitAnswer.WAIT:
            self._world.wait(self._spec.episode_id, BLOCK_SECONDS, self.admit)
        else:
            raise RuntimeError(f"{self._spec.episode_id}: {answer}")

    def _create(self, role: Role) -> None:
        request = a_request(self._spec, role)
        self._ledger.allocations.intend(self._spec.episode_id, role, request, self._lease.token)
        self._row = Allocation(
            allocation_id=request.allocation_id,
            episode_id=self._spec.episode_id,
            role=role,
            state=AllocationState.INTENDED,
            intended_at=0,
        )
        self._names.append(request.allocation_id)
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
        self._owns, self._began = refusal is None, self._world.now
        self._world.after(self._seconds("create") / 2, lambda: self._hear(creation, role, refusal))

    def _hear(self, creation: Creation, role: Role, refusal: RateLimited | ConcurrencyLimited | None) -> None:
        if self._dies():
            return
        if refusal is None:
            self._own(self._lease.token)
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

    def _own(self, token: str) -> None:
        """Write down the id that the provider named, and the size."""
        assert self._row is not None
        name = f"sbx-{self._row.allocation_id}"
        self._ledger.allocations.created(self._row, name, token, creating_ms=0)
        row = self._ledger.allocations.sized(self._row, vcpus=_VCPUS, memory_mb=_MEMORY_MB).row
        self._row = row.model_copy(update={"sandbox_id": name})

    def _absent(self, token: str) -> None:
        """Write down that the provider says that it is gone."""
        assert self._row is not None
        running_ms = int(1000 * (self._world.now - self._began))
        self._ledger.allocations.absent(self._row, token, running_ms=running_ms)
        self._row = None

    def _confirmed(self) -> None:
        self._absent(self._lease.token)
        role = next(self._roles, None)
        if role is not None:
            self._create(role)
        else:
            self._end(Outcome.SOLVED, self._lease.token)

    def _end(self, outcome: Outcome, token: str) -> None:
        self._ledger.commit(a_receipt(self._spec, outcome, allocations=tuple(self._names)), token)
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
        """What the reconciler does; a creation that came to nothing is struck out instead of sent again and deleted."""
        expire(self._world.redis, self._spec.episode_id)
        token = self._ledger.seize(self._spec.episode_id, "reconciler", lease_seconds=30)
        assert token is not None
        if self._owns:
            assert self._row is not None
            if self._row.sandbox_id is None:
                self._own(token)
            self._world.provider.delete(self._world.now)
            self._owns = False
            self._absent(token)
        elif self._row is not None:
            self._ledger.allocations.refused(self._row, token, "its process died before a sandbox came of it")
        self._end(Outcome.WORKER_LOST, token)

    def _seconds(self, call: str) -> float:
        return self._world.dice.uniform(*_ANSWER_SECONDS[call])


def _check(world: World, farm: Farm, episodes: int) -> None:
    expected = {f"e-{number}": 1.0 for number in range(1, episodes + 1)}
    running = [f"{world.provider.running} of the provider"] if world.provider.running else []
    reading = read(farm, "run-test", expected=expected, told={}, sandboxes=running)
    problems = violations(reading)
    counted = sum(reading.counters.get(f"created:{role}", 0) for role in Role)
    facts = {
        "one end each": world.finished == episodes,
        "every creation on record": counted == world.provider.created,
        "never more permits than the limit": world.most_permits <= world.concurrency,
        "never more sandboxes than the limit": world.provider.highest <= min(world.concurrency, world.provider.cap),
    }
    problems += [f"not so: {fact}" for fact, holds in facts.items() if not holds]
    if problems:
        raise RuntimeError("\n".join([f"{len(problems)} violations", *problems[:20]]))


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
