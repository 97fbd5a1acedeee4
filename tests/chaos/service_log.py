"""What the sandbox service itself logged over a round, and where the ledger says otherwise.

Its log is in memory and dies with it, so it is read again and again. What always holds: a `Life` is one process of the
service, with everything that it logged until `read_at`; what it did between that and its death nobody knows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from orchestrator.records import Allocation
from orchestrator.vocabulary import AllocationState

Event = dict[str, Any]
"""As `workers/e2b_local/events.py` writes them."""

_EVERY_SECONDS = 1.0
_CLOCK_SECONDS = 0.01
"""Redis counts in milliseconds, the service in less."""


@dataclass(frozen=True)
class Life:
    """One process of the service; times are unix seconds."""

    events: Sequence[Event]
    read_at: float


class ServiceLog:
    """Reads the log of a service at `url` every second in a thread of its own, over all its lives."""

    def __init__(self, url: str, key: str) -> None:
        self.lives: list[Life] = []
        self._url, self._key = url, key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="service log", daemon=True)

    def __enter__(self) -> ServiceLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def read(self) -> None:
        """Read it now; raises httpx.HTTPError when the service is away."""
        asked_at = time.time()
        answer = httpx.get(f"{self._url}/admin/events", headers={"X-API-KEY": self._key}, timeout=10)
        self.lives = joined(self.lives, answer.raise_for_status().json(), asked_at)

    def close(self) -> None:
        """Read it for the last time."""
        self._stop.set()
        self._thread.join()
        self.read()

    def _main(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            with suppress(httpx.HTTPError):
                self.read()


def joined(lives: Sequence[Life], events: Sequence[Event], asked_at: float) -> list[Life]:
    """The lives after one more reading: a log that does not go on where the last one ended is another process's."""
    same = bool(lives) and list(events[: len(lives[-1].events)]) == list(lives[-1].events)
    return [*(lives[:-1] if same else lives), Life(events, asked_at)]


def contradictions(lives: Sequence[Life], rows: Iterable[Allocation], *, limit: int) -> list[str]:
    """Where the service's log and the ledger's rows do not fit each other, and more sandboxes than the limit."""
    named = {row.sandbox_id: row for row in rows if row.sandbox_id is not None}
    found: list[str] = []
    for number, life in enumerate(lives):
        last = number == len(lives) - 1
        ends = {event["sandbox_id"]: event for event in life.events if event["event"] != "created"}
        for event in life.events:
            if event["event"] == "created":
                sandbox = event["sandbox_id"]
                found += _one(sandbox, ends.get(sandbox), named.get(sandbox), None if last else life.read_at)
        if (most := max((event["live"] for event in life.events), default=0)) > limit:
            found.append(f"the service had {most} sandboxes at once under a limit of {limit}")
    return found


def _one(sandbox: str, end: Event | None, row: Allocation | None, died_after: float | None) -> Iterable[str]:
    """What is wrong with one sandbox; `died_after` is set when the service died, not before that."""
    ended_at = end["time"] if end is not None else died_after
    if ended_at is None:
        yield f"{sandbox} still runs, {'and no row names it' if row is None else f'its row is {row.state}'}"
    elif row is None:
        if end is not None and end["event"] not in ("deleted", "failed"):
            yield f"{sandbox} was {end['event']}, and no row names it: nobody deleted it as an orphan"
    elif row.state is not AllocationState.ABSENT or row.absent_at is None:
        yield f"{sandbox} of {row.allocation_id} has ended, its row is {row.state}"
    elif row.absent_at < ended_at - _CLOCK_SECONDS:
        yield f"{row.allocation_id} is absent since {row.absent_at}, the service had {sandbox} until {ended_at}"
