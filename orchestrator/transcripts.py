"""What the policy did and saw, kept under a key of its own, capped, apart from the receipt."""

from __future__ import annotations

import json
from typing import Any, cast

from redis import Redis

from orchestrator.keys import Keys


class Transcript:
    """One episode's transcript; past its cap it says so once and keeps no more."""

    def __init__(self, redis: Redis, episode_id: str, *, limit_bytes: int, retention_seconds: int) -> None:
        self._redis = redis
        self._key = Keys.transcript(episode_id)
        self._left = limit_bytes
        self._retention = retention_seconds

    def add(self, role: str, text: str) -> None:
        """Append one entry: role is tool name for calls, 'observation' for what came back."""
        if self._left <= 0:
            return
        entry = json.dumps({"role": role, "text": text})
        self._left -= len(entry)
        if self._left <= 0:
            entry = json.dumps({"role": "notice", "text": "transcript cut at its cap"})
        pipeline = self._redis.pipeline()
        pipeline.rpush(self._key, entry)
        pipeline.expire(self._key, self._retention)
        pipeline.execute()


def read_transcript(redis: Redis, episode_id: str) -> list[dict[str, Any]]:
    """The entries of one episode, oldest first."""
    return [json.loads(entry) for entry in cast("list[str]", redis.lrange(Keys.transcript(episode_id), 0, -1))]
