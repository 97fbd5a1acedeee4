"""What happens to each request while faults are set: decided here, from the calls and their times alone.

No clock, no network: given the same faults and the same calls, the same verdicts. The seam (`injection`) carries them
out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import TypeVar

from workers.e2b_local.faults import Faults, Often, Operation

V = TypeVar("V", int, float)

_SANDBOXES = 100_000
"""Sandboxes remembered for their first deletion or their commands: the oldest is forgotten first."""


class Ending(Enum):
    """What a client gets of the answer to a call that was carried out."""

    WHOLE = auto()
    LOST = auto()
    CUT = auto()
    STALLED = auto()
    BAD_GATEWAY = auto()


@dataclass(frozen=True)
class Call:
    """One request: its operation, and the sandbox it names or asks for."""

    operation: Operation
    metadata: Mapping[str, str] | None = None
    """Of that sandbox; None when there is none."""


@dataclass(frozen=True)
class Refusal:
    """An answer in place of the real one; nothing is carried out."""

    status: int
    message: str
    retry_after_seconds: int | None = None
    html: bool = False
    """Whether it is a page, as of a proxy in front, and no answer of the API."""


@dataclass(frozen=True)
class Verdict:
    """What happens to a call, in this order: delayed, then hung, refused or carried out and answered as `ending`."""

    delay_seconds: float = 0.0
    hangs: bool = False
    refusal: Refusal | None = None
    ending: Ending = Ending.WHOLE


class Plan:
    """The faults as set, and what has been used up of them; `hits` counts what was really injected, by name."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.hits: Counter[str] = Counter()
        self._random = Random(faults.seed)
        self._used: Counter[str] = Counter()
        self._full_at = 0.0
        self._first_deletions: dict[str, float] = {}
        self._commands: dict[str, int] = {}

    def judge(self, call: Call, now: float) -> Verdict:
        """Decide one call that arrives at `now` (seconds of any steady clock)."""
        faults, operation = self.faults, call.operation
        creates = operation is Operation.CREATE
        meant = self.concerns(call.metadata)
        delay = 0.0
        if meant and operation in faults.latency:
            delay = faults.latency[operation].draw(self._random)
            self.hits[f"latency.{operation}"] += 1
        if meant and self._strikes("hung", operation):
            return Verdict(delay, hangs=True)
        if meant and self._strikes("unavailable", operation):
            return Verdict(delay, refusal=Refusal(503, "the service is unavailable"))
        if meant and self._strikes("page", operation):
            return Verdict(delay, refusal=Refusal(faults.page_status, "a page", html=True))
        if creates and (refusal := self._too_fast(now, meant=meant)):
            return Verdict(delay, refusal=refusal)
        return Verdict(delay, ending=self._ending(operation) if meant else Ending.WHOLE)

    def deletion(self, sandbox_id: str, metadata: Mapping[str, str], now: float) -> Refusal | float:
        """A refusal, or how many seconds later than answered the sandbox goes."""
        faults = self.faults
        if not self.concerns(metadata):
            return 0.0
        if faults.undeletable_seconds:
            first = _remember(self._first_deletions, sandbox_id, now)
            if now - first < faults.undeletable_seconds:
                self.hits["undeletable"] += 1
                return Refusal(500, f'sandbox "{sandbox_id}" cannot be deleted now')
        if faults.delete_lag_seconds:
            self.hits["delete_lag"] += 1
        return faults.delete_lag_seconds

    def life_seconds(self, metadata: Mapping[str, str]) -> float | None:
        """How long a sandbox that has just started lives; None when nothing shortens its life."""
        return self.faults.dies_after_seconds or None if self.concerns(metadata) else None

    def kills(self, sandbox_id: str, metadata: Mapping[str, str]) -> bool:
        """Count a command that has been run; whether its sandbox dies of it."""
        most = self.faults.dies_after_commands
        if not most or not self.concerns(metadata):
            return False
        count = _remember(self._commands, sandbox_id, 0) + 1
        self._commands[sandbox_id] = count
        return count == most

    def concerns(self, metadata: Mapping[str, str] | None) -> bool:
        """Whether a sandbox of this metadata, or a call for none, meets the faults that `only` narrows."""
        return metadata is None or self.faults.only.items() <= metadata.items()

    def _ending(self, operation: Operation) -> Ending:
        if self._strikes("lost", operation):
            return Ending.LOST
        if self._strikes("bad_gateway", operation):
            return Ending.BAD_GATEWAY
        if operation is Operation.COMMAND and self._happens("stream_cut", self.faults.stream_cut):
            return Ending.CUT
        if operation is Operation.COMMAND and self._happens("stream_stalled", self.faults.stream_stalled):
            return Ending.STALLED
        return Ending.WHOLE

    def _too_fast(self, now: float, *, meant: bool) -> Refusal | None:
        """The generic cell rate algorithm: what is refused uses nothing up."""
        faults = self.faults
        wait = 0.0
        if faults.create_rate:
            gap = 1 / faults.create_rate
            wait = max(0.0, self._full_at - (faults.create_burst - 1) * gap - now)
        refused = wait > 0
        if refused:
            self.hits["create_rate"] += 1
        elif meant and self._happens("rate_limited", faults.rate_limited):
            refused = True
        if refused:
            pause = max(1, math.ceil(wait)) if faults.retry_after else None
            return Refusal(429, "rate limit exceeded for sandbox creations, please try again later", pause)
        if faults.create_rate:
            self._full_at = max(self._full_at, now) + gap
        return None

    def _strikes(self, fault: str, operation: Operation) -> bool:
        often: dict[Operation, Often] = getattr(self.faults, fault)
        return operation in often and self._happens(f"{fault}.{operation}", often[operation])

    def _happens(self, name: str, often: Often) -> bool:
        happens = self._used[name] < often.count
        if happens:
            self._used[name] += 1
        elif often.probability:
            happens = self._random.random() < often.probability
        if happens:
            self.hits[name] += 1
        return happens


def _remember(rows: dict[str, V], key: str, value: V) -> V:
    """What is known of a key, otherwise `value`; bounded."""
    known = rows.setdefault(key, value)
    if len(rows) > _SANDBOXES:
        del rows[next(iter(rows))]
    return known
