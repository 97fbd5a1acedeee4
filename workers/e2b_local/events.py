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
    live: int  # sandboxes that exist from here on, those that are starting or ending included


class EventLog:
    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self.live = 0

    def append(self, event: Kind, sandbox_id: str, metadata: dict[str, str]) -> None:
        self.live += 1 if event == "created" else -1
        self._events.append(Event(time.time(), event, sandbox_id, metadata, self.live))

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(event) for event in self._events]

    def ended_since(self, moment: float) -> int:
        """How many sandboxes have ended since then."""
        count = 0
        for event in reversed(self._events):
            if event.time < moment:
                break
            count += event.event != "created"
        return count

    def most_live(self, since: float) -> int:
        """The most sandboxes that existed at once since then, as far back as the log goes."""
        most = self.live
        for event in reversed(self._events):
            if event.time < since:
                return max(most, event.live)
            most = max(most, event.live)
        return most
