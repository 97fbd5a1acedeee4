"""How long a run waits while no worker is alive, and what its user is told when that was too long.

What always holds: one look that finds a living worker begins the wait anew; a Redis that does not answer says nothing
about workers, and whoever waits for it reports that.
"""

from __future__ import annotations

import time

from orchestrator.errors import FarmError, NeverFits
from orchestrator.pool import Pool

PATIENCE_SECONDS = 60.0
"""Enough to start a worker by hand, or for one to be started again."""


class Absence:
    """One wait for the farm's workers, from now on."""

    def __init__(self, pool: Pool, patience_seconds: float) -> None:
        self._pool = pool
        self._patience = patience_seconds
        self._seen_at = time.monotonic()

    def problem(self) -> NeverFits | None:
        """Look: what to do when no worker has been alive for the whole patience; None while it may go on."""
        try:
            alive = self._pool.capacity().live_slots > 0
        except FarmError:
            return None
        now = time.monotonic()
        if alive:
            self._seen_at = now
        if now - self._seen_at <= self._patience:
            return None
        return NeverFits(
            f"no worker has been alive for {self._patience:g} s: start `rollout-farm worker` or `rollout-farm up`, "
            "with the same REDIS_URL and FARM_QUEUE"
        )
