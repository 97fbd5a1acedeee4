"""What the last whole round of reconciling could not do, by id, and when that round was.

Shown by status, and how orphans are not forgotten. What always holds: an orphan stands here before its deletion is
asked for, so that it is counted once and a process that dies half-way leaves it to the next; what has been settled is
struck off by the next whole round.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from redis import Redis

from orchestrator.keys import Keys
from orchestrator.scripts import Scripts

_REMEMBERED_SECONDS = 7 * 24 * 3600

ORPHANS_DELETED = "orphans_deleted"
"""The counter of deleted orphans; settle_orphan.lua moves it."""


class Kind(StrEnum):
    """What the id of an unresolved item names."""

    EPISODE = "episode"
    ALLOCATION = "allocation"
    SANDBOX = "sandbox"
    PROVIDER = "provider"


@dataclass(frozen=True)
class Item:
    """One thing that could not be settled; `since` in unix seconds of Redis."""

    kind: Kind
    id: str
    reason: str
    since: float
    allocation_id: str = ""
    """Of a sandbox: the allocation that its tags name."""

    def as_json(self) -> dict[str, Any]:
        """As shown."""
        return {"kind": self.kind, "id": self.id, "reason": self.reason, "since": self.since}


class Unresolved:
    """Reads and writes the list."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._scripts = Scripts(redis)

    def items(self) -> list[Item]:
        """All of them, oldest first."""
        rows = cast("dict[str, str]", self._redis.hgetall(Keys.UNRESOLVED))
        return sorted((_item(field, text) for field, text in rows.items()), key=lambda item: (item.since, item.id))

    def counts(self) -> dict[Kind, int]:
        """How many of each kind; every kind is there."""
        found = Counter(item.kind for item in self.items())
        return {kind: found[kind] for kind in Kind}

    def orphans(self) -> dict[str, str]:
        """Sandbox id -> allocation id of the orphans whose deletion was begun."""
        return {item.id: item.allocation_id for item in self.items() if item.kind is Kind.SANDBOX}

    def keep(self, kind: Kind, name: str, reason: str, *, now: float, allocation_id: str = "") -> None:
        """Put it on the list, or renew its reason; it stays listed since the first time."""
        field = f"{kind}:{name}"
        known = self._redis.hget(Keys.UNRESOLVED, field)
        since = _item(field, cast(str, known)).since if known else now
        body = {"reason": reason[:1000], "since": since, "allocation": allocation_id}
        self._redis.hset(Keys.UNRESOLVED, field, json.dumps(body))

    def strike(self, kind: Kind, name: str) -> None:
        """Take it off the list."""
        self._redis.hdel(Keys.UNRESOLVED, f"{kind}:{name}")

    def strike_deleted_orphan(self, sandbox_id: str) -> None:
        """Take a deleted orphan off the list and count it."""
        self._scripts.run("settle_orphan", [Keys.UNRESOLVED, Keys.COUNTERS], [f"{Kind.SANDBOX}:{sandbox_id}"])

    def replace(self, found: Mapping[tuple[Kind, str], str], *, now: float) -> None:
        """After a whole round: these, and the orphans, are all that is left."""
        for item in self.items():
            if item.kind is not Kind.SANDBOX and (item.kind, item.id) not in found:
                self.strike(item.kind, item.id)
        for (kind, name), reason in found.items():
            if kind is not Kind.SANDBOX:
                self.keep(kind, name, reason, now=now)
        self._redis.set(Keys.RECONCILED, int(now * 1000), ex=_REMEMBERED_SECONDS)

    def reconciled_at(self) -> float | None:
        """When the last whole round ended, in unix seconds of Redis; None when that is a week ago or never was."""
        found = cast("str | None", self._redis.get(Keys.RECONCILED))
        return None if found is None else int(found) / 1000


def _item(field: str, text: str) -> Item:
    kind, _, name = field.partition(":")
    body = json.loads(text)
    return Item(Kind(kind), name, body["reason"], body["since"], body["allocation"])
