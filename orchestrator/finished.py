"""The stream of one run's finished episodes: how anybody waits for receipts without polling."""

from __future__ import annotations

from typing import Any, cast

from redis import Redis

from orchestrator.connection import BLOCK_SECONDS
from orchestrator.keys import Keys

START = "0"
"""Before the first entry."""


class Finished:
    """Reads a run's stream; positions are stream ids."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._key = Keys.finished(run_id)

    def position(self) -> str:
        """After the newest entry: take it, look for the receipt, then wait from here, and nothing is missed."""
        newest = cast("list[tuple[str, dict[str, str]]]", self._redis.xrevrange(self._key, count=1))
        return newest[0][0] if newest else START

    def after(self, position: str, seconds: float) -> list[tuple[str, str]]:
        """(position, episode id) of what ended after `position`, waiting at most `seconds` (<= 5) for the first."""
        block = max(1, int(min(seconds, BLOCK_SECONDS) * 1000))
        answer: Any = self._redis.xread({self._key: position}, block=block, count=1000)
        return [(entry, fields["episode"]) for entry, fields in _entries(answer)]


def _entries(answer: Any) -> list[tuple[str, dict[str, str]]]:
    """The entries of an XREAD answer, whichever protocol version shaped it."""
    if not answer:
        return []
    rows = next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1]
    nested = rows and isinstance(rows[0], list) and rows[0] and isinstance(rows[0][0], list | tuple)
    return list(rows[0]) if nested else list(rows)
