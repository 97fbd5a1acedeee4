"""Which reconciler leads: one at a time over all orchestrators, by a lock in Redis that expires unless renewed."""

from __future__ import annotations

from typing import cast

from redis import Redis

from orchestrator.keys import Keys
from orchestrator.scripts import Scripts

LEAD_SECONDS = 10.0
"""How long a leader that stopped renewing keeps others waiting."""


class Leadership:
    """One candidate."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._redis = redis
        self._scripts = Scripts(redis)
        self._name = name

    def take(self) -> bool:
        """Take or keep the lead; False while somebody else has it."""
        return bool(self._scripts.run("lead", [Keys.RECONCILER], [self._name, int(LEAD_SECONDS * 1000)]))

    def give_back(self) -> None:
        """Let the next one lead at once; changes nothing when it is not ours."""
        self._scripts.run("resign", [Keys.RECONCILER], [self._name])


def leader(redis: Redis) -> str | None:
    """Who leads, or None when nobody does."""
    return cast("str | None", redis.get(Keys.RECONCILER))
