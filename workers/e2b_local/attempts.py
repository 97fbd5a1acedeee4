"""The provider's own log of creation attempts: when each arrived and what its sender was answered.

In memory only and bounded: the newest 100,000. What exists because of them is in the event log (`events`).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from workers.e2b_local.asgi import App, Message, Receive, Scope, Send, connection_of, headers_of

_KEPT = 100_000


@dataclass(frozen=True)
class Attempt:
    """One request for a sandbox. `status` None: its sender was answered nothing, whatever was done."""

    time: float  # seconds since the epoch, of its arrival
    seconds: float  # until it was answered
    status: int | None
    key: str | None  # its idempotency key


class Attempts:
    """Watches creations pass by."""

    def __init__(self) -> None:
        self._rows: deque[Attempt] = deque(maxlen=_KEPT)
        self._seen = 0

    async def watch(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Let `app` answer one creation, and note what it answered."""
        arrived, began = time.time(), time.monotonic()
        connection = connection_of(scope)
        status: int | None = None

        async def noting(message: Message) -> None:
            nonlocal status
            left = connection is not None and connection.is_closing()
            if message["type"] == "http.response.start" and not left:
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, noting)
        finally:
            seconds = round(time.monotonic() - began, 6)
            self._rows.append(Attempt(arrived, seconds, status, headers_of(scope).get("idempotency-key")))
            self._seen += 1

    def rows(self, since: float) -> list[dict[str, Any]]:
        """Those that arrived at `since` or later, in the order of their answers."""
        return [asdict(row) for row in self._rows if row.time >= since]

    @property
    def forgotten(self) -> int:
        """How many attempts were too many to be kept."""
        return self._seen - len(self._rows)
