"""One creation for each idempotency key, however often it is asked for, and also after its sandbox has ended."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

# Answers kept: far more than a day of creations at the provider's fastest plan would need to settle unknown outcomes.
_KEYS = 100_000


class KeyMismatch(Exception):
    """The key was used before, for something else."""


@dataclass(frozen=True)
class _Entry:
    request: Any
    answer: "asyncio.Future[dict[str, Any]]"


class Idempotency:
    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    async def once(self, key: str, request: Any, create: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Create, or wait for the creation under way, or repeat its answer. A failed creation frees its key."""
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(request, asyncio.ensure_future(create()))
            self._entries[key] = entry
            if len(self._entries) > _KEYS:
                del self._entries[next(iter(self._entries))]
        elif entry.request != request:
            raise KeyMismatch(key)
        try:
            # Shielded: a caller that leaves does not take the creation from those who still wait.
            return await asyncio.shield(entry.answer)
        except BaseException:
            if entry.answer.done() and self._entries.get(key) is entry:
                del self._entries[key]
            raise
