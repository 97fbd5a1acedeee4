"""Sandboxes as the ledger sees them: intent before anything is sent, settled only by what the provider confirmed.

What always holds: a state changes only along `vocabulary.TRANSITIONS`, only under the owner's token; cost and clean-up
counters move in the same script as the settlement. A sandbox is priced at the rates that its episode got its permit
at, whoever settles it: money was reserved at those, and a hard cap holds only while no cost exceeds its reservation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from redis import Redis

from orchestrator.cost import Rates, Size, cost_picousd
from orchestrator.counts import cost_bounds
from orchestrator.errors import FarmError, LeaseLost
from orchestrator.keys import Keys
from orchestrator.provider import CreateRequest
from orchestrator.records import Allocation
from orchestrator.scripts import Scripts
from orchestrator.vocabulary import TRANSITIONS, AllocationState, Role

RECONCILER_TOKEN = "*"
"""Moves an unsettled allocation whose episode has its receipt already; no slot can own that any more."""

_AFTERLIFE_SECONDS = 3600
"""A settled row outlives the retention: its receipt is written after it, and needs it to its own end."""

Fields = dict[str, str | int]


@dataclass(frozen=True)
class Running:
    """Unsettled sandboxes of one role in one state, and what those together cost that are not past their life.

    A size that is not known yet is the one that its episode's money was reserved for, as in `Allocations.cost_of`.
    """

    role: Role
    state: AllocationState
    count: int
    picousd_per_hour: int


class Sized(NamedTuple):
    """An allocation whose real size is known."""

    row: Allocation
    affordable: bool
    """False when it is larger than what was reserved for, and a budget cannot bear that."""


class Allocations:
    """Reads and writes allocation rows. A simulation gives it a clock, in ms."""

    def __init__(
        self, redis: Redis, *, rates: Rates, retention_seconds: int, clock_ms: Callable[[], int] | None = None
    ) -> None:
        self._redis = redis
        self._scripts = Scripts(redis, clock_ms=clock_ms)
        self.rates = rates
        self._retention = retention_seconds

    def intend(
        self, episode_id: str, role: Role, request: CreateRequest, token: str, *, longest_seconds: int | None = None
    ) -> None:
        """Write the intent, with the exact create request, before anything is sent.

        It is never priced for more than `longest_seconds`: whenever its absence is confirmed, it lived no longer.
        """
        longest = longest_seconds or request.lifetime_seconds
        keys = [Keys.episode(episode_id), Keys.allocation(request.allocation_id), Keys.ALLOCATIONS]
        args: list[str | int | float] = [token, request.allocation_id, episode_id, role, _dump(request), longest * 1000]
        answer = self._scripts.run("write_intent", keys, args)
        if answer == 0:
            raise LeaseLost(f"{episode_id}: token {token} may no longer allocate")
        if answer == -1:
            raise FarmError(f"{request.allocation_id}: a sandbox went by this id already")

    def created(self, row: Allocation, sandbox_id: str, token: str, *, creating_ms: int) -> None:
        """The provider named an id, `creating_ms` after the request was sent."""
        self._move(row, AllocationState.CREATED, token, {"sandbox": sandbox_id, "creating_ms": creating_ms})

    def sized(self, row: Allocation, *, vcpus: int, memory_mb: int) -> Sized:
        """Note the sandbox's real size, which is what it costs; its episode's reservation is corrected to it."""
        keys = [Keys.allocation(row.allocation_id), Keys.episode(row.episode_id), Keys.SIZES, Keys.BUDGET]
        rates = self.rates
        args: list[str | int | float] = [vcpus, memory_mb, rates.vcpu_picousd, rates.gib_picousd, Keys.BUDGET_PREFIX]
        affordable = bool(self._scripts.run("size_allocation", keys, args))
        return Sized(row.model_copy(update={"vcpus": vcpus, "memory_mb": memory_mb}), affordable)

    def unknown(self, row: Allocation, token: str, detail: str) -> None:
        """The answer was lost: it may exist. Said again, its longest possible life counts from then."""
        self._move(row, AllocationState.UNKNOWN, token, {"detail": detail})

    def refused(self, row: Allocation, token: str, detail: str) -> None:
        """The provider allocated nothing and will not any more."""
        self._move(row, AllocationState.REFUSED, token, {"detail": detail})

    def unresolved(self, row: Allocation, token: str, detail: str) -> None:
        """Deletion could not be confirmed; the reconciler keeps at it and the permit stays held."""
        self._move(row, AllocationState.UNRESOLVED, token, {"detail": detail})

    def expired(self, row: Allocation, token: str, detail: str, *, running_ms: int = 0) -> None:
        """The longest possible life of what may have been created is over; `running_ms` of it are priced."""
        fields, counters = self._priced(row, running_ms) if running_ms else ({}, {})
        self._move(row, AllocationState.EXPIRED, token, {"detail": detail, **fields}, counters)

    def absent(self, row: Allocation, token: str, *, running_ms: int) -> None:
        """Confirmed absent after running for `running_ms`; priced at its size, or what was reserved for if unknown."""
        self._move(row, AllocationState.ABSENT, token, *self._priced(row, running_ms))

    def _priced(self, row: Allocation, running_ms: int) -> tuple[Fields, dict[str, int]]:
        """Fields and counters of what a sandbox cost."""
        if row.longest_seconds is not None:
            running_ms = min(running_ms, int(1000 * row.longest_seconds))
        cost = self.cost_of(row, running_ms)
        fields: Fields = {"running_ms": running_ms, "cost_picousd": cost}
        counters = {f"sandbox_ms:{row.role}": running_ms, f"cost_picousd:{row.role}": cost}
        return fields, counters

    def cost_of(self, row: Allocation, running_ms: int) -> int:
        """Pico-dollars of so long a life, at its episode's rates; at this process's while it never had a permit.

        Of its real size; while nobody has seen that, of the one that its episode's reservation was reckoned with.
        """
        found = cast("list[str | None]", self._redis.hmget(Keys.episode(row.episode_id), ["size", "rates"]))
        size, rates = ([int(part) for part in text.split(":")] if text else None for text in found)
        of = Size(*size) if size else self.rates.assumed
        if row.vcpus is not None and row.memory_mb is not None:
            of = Size(row.vcpus, row.memory_mb)
        priced = Rates.of_picousd(*rates) if rates else self.rates
        return cost_picousd(running_ms, vcpus=of.vcpus, memory_mb=of.memory_mb, rates=priced)

    def put_back(self, row: Allocation) -> None:
        """Put its times that lie ahead of Redis's clock back: they were noted before that stepped back."""
        self._scripts.run("put_back_allocation", [Keys.allocation(row.allocation_id)], [])

    def get(self, allocation_id: str) -> Allocation | None:
        """One allocation as it stands."""
        raw = cast("dict[str, str]", self._redis.hgetall(Keys.allocation(allocation_id)))
        return _allocation(raw) if raw else None

    def request(self, allocation_id: str) -> CreateRequest | None:
        """The exact create request that was stored with the intent."""
        text = self._redis.hget(Keys.allocation(allocation_id), "request")
        return CreateRequest(**json.loads(cast(str, text))) if text else None

    def unsettled(self) -> list[Allocation]:
        """Every allocation that may still run, oldest first."""
        ids = cast("list[str]", self._redis.zrange(Keys.ALLOCATIONS, 0, -1))
        return [row for row in self.each(ids) if row is not None]

    def running(self) -> list[Running]:
        """Those that may still run, added up by role and state in one look."""
        rates, size = self.rates, self.rates.assumed
        args: list[str | int | float] = [Keys.allocation(""), size.vcpus, size.memory_mb]
        args += [Keys.episode(""), rates.vcpu_picousd, rates.gib_picousd]
        text = self._scripts.run("read_sandboxes", [Keys.ALLOCATIONS], args)
        return [
            Running(Role(name.partition(":")[0]), AllocationState(name.partition(":")[2]), count, int(hourly))
            for name, (count, hourly) in sorted(json.loads(text).items())
        ]

    def each(self, allocation_ids: Sequence[str]) -> list[Allocation | None]:
        """These allocations as they stand, in this order, in one round trip; None for one that is not there."""
        pipeline = self._redis.pipeline(transaction=False)
        for allocation_id in allocation_ids:
            pipeline.hgetall(Keys.allocation(allocation_id))
        rows = cast("list[dict[str, str]]", pipeline.execute() if allocation_ids else [])
        return [_allocation(raw) if raw else None for raw in rows]

    def still_unsettled(self, allocation_ids: Sequence[str]) -> set[str]:
        """Those of these allocations that may still run; one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        for allocation_id in allocation_ids:
            pipeline.zscore(Keys.ALLOCATIONS, allocation_id)
        found = zip(allocation_ids, pipeline.execute() if allocation_ids else [], strict=True)
        return {allocation_id for allocation_id, since in found if since is not None}

    def _move(
        self,
        row: Allocation,
        state: AllocationState,
        token: str,
        fields: Fields,
        counters: dict[str, int] | None = None,
    ) -> None:
        allowed = [origin for origin, following in TRANSITIONS.items() if state in following]
        counted = dict(counters or {})
        if state is AllocationState.CREATED:
            counted[f"created:{row.role}"] = 1
        if state.settled or state is AllocationState.UNRESOLVED:
            counted[f"cleanups:{state}"] = 1
        keys = [
            Keys.episode(row.episode_id),
            Keys.allocation(row.allocation_id),
            Keys.ALLOCATIONS,
            Keys.COUNTERS,
            Keys.PERMITS,
            Keys.WAITERS,
            Keys.PLACES,
            Keys.LIMITS,
            Keys.CREATORS,
            Keys.CREATORS_DUE,
            Keys.BUDGET,
            Keys.BATCHES,
            Keys.receipt(row.episode_id),
            Keys.attempt(row.episode_id),
        ]
        answer = self._scripts.run(
            "move_allocation",
            keys,
            [
                token,
                row.allocation_id,
                row.episode_id,
                state,
                ",".join(allowed),
                int(state.settled),
                self._retention,
                Keys.WAKE_PREFIX,
                json.dumps(fields),
                json.dumps(counted),
                fields.get("cost_picousd", 0),
                json.dumps(cost_bounds()),
                Keys.BUDGET_PREFIX,
                self._retention + _AFTERLIFE_SECONDS,
            ],
        )
        if answer == 0:
            raise LeaseLost(f"{row.allocation_id}: token {token} may no longer write")
        if answer == -1:
            raise FarmError(f"{row.allocation_id}: {row.state} cannot become {state}")


def _dump(request: CreateRequest) -> str:
    body = {name: getattr(request, name) for name in request.__dataclass_fields__}
    return json.dumps({name: dict(value) if name in ("metadata", "envs") else value for name, value in body.items()})


def _allocation(raw: dict[str, str]) -> Allocation:
    def at(name: str) -> float | None:
        return int(raw[name]) / 1000 if name in raw else None

    def number(name: str) -> int | None:
        return int(raw[name]) if name in raw else None

    created = at("created_at")
    return Allocation(
        allocation_id=raw["allocation"],
        episode_id=raw["episode"],
        role=Role(raw["role"]),
        state=AllocationState(raw["state"]),
        sandbox_id=raw.get("sandbox"),
        vcpus=number("vcpus"),
        memory_mb=number("memory_mb"),
        longest_seconds=int(raw["longest_ms"]) / 1000 if "longest_ms" in raw else None,
        intended_at=int(raw["intended_at"]) / 1000,
        created_at=created - int(raw.get("creating_ms", 0)) / 1000 if created is not None else None,
        unknown_at=at("unknown_at"),
        unresolved_at=at("unresolved_at"),
        absent_at=at("absent_at"),
        running_seconds=int(raw["running_ms"]) / 1000 if "running_ms" in raw else None,
        cost_picousd=number("cost_picousd"),
        detail=raw.get("detail"),
    )
