"""What the policy did and saw, kept under a key of its own, capped, apart from the receipt."""

from __future__ import annotations

import json
import time
from typing import Any, cast

from redis import Redis

from orchestrator.keys import Keys
from orchestrator.scripts import Scripts

_FLUSH_SECONDS = 1.0
"""How long an entry may stay in this process: nothing waits for it, and a reader sees it soon enough."""


class Transcript:
    """One episode's transcript; past its cap it says so once and keeps no more. Flush it before the receipt."""

    def __init__(self, redis: Redis, episode_id: str, *, limit_bytes: int, retention_seconds: int) -> None:
        self._scripts = Scripts(redis)
        self._key = Keys.transcript(episode_id)
        self._left = limit_bytes
        self._retention = retention_seconds
        self._pending: list[str] = []
        self._flushed = time.monotonic()

    def add(self, role: str, text: str) -> None:
        """Append one entry: role is the tool's name for calls, 'observation' for what came back."""
        if self._left <= 0:
            return
        entry = json.dumps({"role": role, "text": text})
        self._left -= len(entry)
        if self._left <= 0:
            entry = json.dumps({"role": "notice", "text": "transcript cut at its cap"})
        self._pending.append(entry)
        self.settle()

    def settle(self) -> None:
        """Write what has been here for a while."""
        if self._pending and time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is still here."""
        self._flushed = time.monotonic()
        if self._pending:
            self._scripts.run("append_transcript", [self._key], [self._retention, *self._pending])
            self._pending.clear()


def read_transcript(redis: Redis, episode_id: str) -> list[dict[str, Any]]:
    """The entries of one episode, oldest first."""
    return [json.loads(entry) for entry in cast("list[str]", redis.lrange(Keys.transcript(episode_id), 0, -1))]
