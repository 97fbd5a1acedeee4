"""One thread, one selector: which callback runs when a descriptor is ready or a time has come."""

from __future__ import annotations

import heapq
import selectors
import time

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
_LONGEST_WAIT_SECONDS = 3600.0  # the kernel does not take any number


def _nothing() -> None:
    """What a cancelled timer does."""


class Timer:
    """A callback that is due at a monotonic time, unless cancelled first."""

    __slots__ = ("callback", "due", "live")

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback = callback
        self.live = True

    def __lt__(self, other: Timer) -> bool:
        return self.due < other.due

    def cancel(self) -> None:
        self.live = False
        # It stays in the queue until it is due, which may be hours: it must not keep a finished exchange alive.
        self.callback = _nothing


class Loop:
    """Callbacks never run inside one another: everything happens in turn on the agent's only thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[Timer] = []

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call back with the ready events of `fd`; no events means: stop watching it."""
        known = fd in self._selector.get_map()
        if events and known:
            self._selector.modify(fd, events, callback)
        elif events:
            self._selector.register(fd, events, callback)
        elif known:
            self._selector.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + seconds, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def run(self) -> None:
        while True:
            for key, events in self._selector.select(self._wait_seconds()):
                # An earlier callback of this round may have stopped watching this one.
                if self._selector.get_map().get(key.fd) == key:
                    key.data(events)
            self._run_due()

    def _wait_seconds(self) -> float | None:
        while self._timers and not self._timers[0].live:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return min(_LONGEST_WAIT_SECONDS, max(0.0, self._timers[0].due - time.monotonic()))

    def _run_due(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0].due <= now:
            timer = heapq.heappop(self._timers)
            if timer.live:
                timer.callback()
