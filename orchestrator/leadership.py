"""Which reconciler leads: one at a time over all orchestrators, by a lock in Redis that expires unless renewed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from redis import Redis
from redis.exceptions import RedisError

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
        return bool(self._scripts.run("hold", [Keys.RECONCILER], [self._name, int(LEAD_SECONDS * 1000)]))

    @contextmanager
    def kept(self, seconds: float = 120.0) -> Iterator[None]:
        """Keep the lead during a block whose calls of the provider may take longer than it lasts."""
        stop, ends = threading.Event(), time.monotonic() + seconds

        def keep() -> None:
            while not stop.wait(LEAD_SECONDS / 4) and time.monotonic() < ends:
                with suppress(RedisError):
                    if not self.take():
                        return

        thread = threading.Thread(target=keep, name="lead", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def give_back(self) -> None:
        """Let the next one lead at once; changes nothing when it is not ours."""
        self._scripts.run("let_go", [Keys.RECONCILER], [self._name])


def leader(redis: Redis) -> str | None:
    """Who leads, or None when nobody does."""
    return Scripts(redis).run("read_hold", [Keys.RECONCILER], [])[0] or None
