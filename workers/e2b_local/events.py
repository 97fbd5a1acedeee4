"""The provider's own log of creations and ends: appended to, never changed, in memory only, the newest 100,000."""

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Literal

_KEPT = 100_000

Kind = Literal["created", "failed", "deleted", "expired", "lost"]


@dataclass(frozen=True)
class Event:
    """`created` is when a creation was accepted; the last three are confirmed ends: by call, by time, by itself."""

    time: float  # seconds since the epoch
    event: Kind
    sandbox_id: str
    metadata: dict[str, str]


class EventLog:
    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_KEPT)

    def append(self, event: Kind, sandbox_id: str, metadata: dict[str, str]) -> None:
        self._events.append(Event(time.time(), event, sandbox_id, metadata))

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in self._events]
