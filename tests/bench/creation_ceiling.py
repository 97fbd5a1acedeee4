"""Creations against a provider that refuses more than five a second: what share of that is used, what share is wasted.

Eight worker processes of two slots each, over one Redis, with the real SDK (creator.py) against a metered provider
(tests/support/metered.py: a token bucket of five a second that holds five, and once one that holds a single one, as of
a provider that lets no burst pass). Everything is read from the provider's own
log, from its first creation on, learning included. The ceiling is all that its bucket can give in that time: the rate,
and the burst that it holds at the beginning. In a last run nothing but the farm's own low limit of
running sandboxes binds: the provider's log shows that there are never more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from redis import Redis

from orchestrator.keys import Keys
from tests.bench.rows import Goal, Row
from tests.support.redis_server import running_redis

_WORKERS = 8
_CEILING = 5
_BURST = 5
_LIMIT = 6
_LIMIT_SECONDS = 20.0
_UNMETERED = 1000
"""A rate, a burst and a cap that sixteen slots cannot reach."""
_SECONDS = 60.0
_SDK_SECONDS = 20.0
_END_SECONDS = 60


@dataclass(frozen=True)
class Tally:
    """What the provider saw within the measured time."""

    created: int
    refused: int
    highest: int
    seconds: float
    rate: float = _CEILING
    burst: int = _BURST

    @property
    def share(self) -> float:
        """Percent of the ceiling."""
        return 100 * self.created / (self.rate * self.seconds + self.burst)

    @property
    def wasted(self) -> float:
        """Percent of all creations that were refused."""
        return 100 * self.refused / max(1, self.created + self.refused)


def creation_ceiling(
    *,
    seconds: float = _SECONDS,
    sdk_seconds: float = _SDK_SECONDS,
    limit_seconds: float = _LIMIT_SECONDS,
    workers: int = _WORKERS,
    limit: int = _LIMIT,
) -> list[Row]:
    """Rows of four ways to create against the same provider, of one without burst, and of a limit that only the farm
    enforces."""
    exact = measure("farm", rate=_CEILING, seconds=seconds, workers=workers)
    burstless = measure("farm", rate=_CEILING, seconds=seconds, workers=workers, burst=1)
    double = measure("farm", rate=2 * _CEILING, seconds=seconds, workers=workers)
    unset = measure("farm", rate=0, seconds=seconds, workers=workers)
    sdk = measure("sdk", rate=0, seconds=sdk_seconds, workers=workers)
    limited = under_limit(limit, seconds=limit_seconds, workers=workers)
    return [
        *_rows("configured at the ceiling", exact, Goal(">=", 98), Goal("<=", 1)),
        *_rows("configured at the ceiling, burst 1", burstless, None, None),
        *_rows("configured twice too high", double, Goal(">=", 90), Goal("<=", 3)),
        *_rows("no rate configured", unset, None, None),
        *_rows("the SDK's own retries instead", sdk, None, None),
        Row(
            f"sandboxes at once, limit {limit}: highest in the provider's log",
            limited.highest,
            "",
            Goal("<=", limit),
            f"{limited.created} created within {limited.seconds:g} s by {2 * workers} slots; the provider itself would "
            f"let {_UNMETERED} run",
        ),
    ]


def under_limit(limit: int, *, seconds: float, workers: int = _WORKERS) -> Tally:
    """Create as fast as one can under a limit of the farm's own; raises RuntimeError when more ran at once."""
    seen = measure("farm", rate=0, limit=limit, seconds=seconds, workers=workers, ceiling=_UNMETERED, burst=_UNMETERED)
    if seen.highest > limit:
        raise RuntimeError(f"{seen.highest} sandboxes ran at once under a limit of {limit}")
    return seen


def measure(
    mode: str,
    *,
    rate: float,
    seconds: float,
    limit: int = 100,
    workers: int = _WORKERS,
    ceiling: float = _CEILING,
    burst: int = _BURST,
    cap: int = _UNMETERED,
) -> Tally:
    """Run so many workers for so long, configured to `rate` and `limit`, against a provider of `ceiling` a second.

    Raises RuntimeError when one failed or left something.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as exits:
        directory = Path(name)
        redis_url = exits.enter_context(running_redis(directory))
        api_url = exits.enter_context(_provider(directory / "creations.jsonl", ceiling, burst, cap))
        arguments = (mode, api_url, redis_url, str(rate), str(limit), str(seconds))
        crew = [exits.enter_context(child("tests.bench.creator", *arguments)) for _ in range(workers)]
        for worker in crew:
            line(worker)
        for worker in crew:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in crew:
            if worker.wait(seconds + _END_SECONDS) != 0:
                raise RuntimeError(f"a worker ended with {worker.returncode}")
        with Redis.from_url(redis_url) as redis:
            if left := [key for key in (Keys.PERMITS, Keys.PLACES, Keys.CREATORS, Keys.OPEN) if redis.exists(key)]:
                raise RuntimeError(f"left in Redis: {left}")
        return _tally(directory / "creations.jsonl", seconds, ceiling, burst)


def _tally(log: Path, seconds: float, ceiling: float, burst: int) -> Tally:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row for row in rows if row[0] <= rows[0][0] + seconds]
    created = sum(row[1] == 201 for row in rows)
    return Tally(created, len(rows) - created, max(row[2] for row in rows), seconds, ceiling, burst)


@contextmanager
def _provider(log: Path, rate: float, burst: int, cap: int) -> Iterator[str]:
    options = ("--rate", str(rate), "--burst", str(burst), "--cap", str(cap), "--log", str(log))
    with child("tests.support.metered", *options) as server:
        yield line(server)


@contextmanager
def child(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes, ended with the block."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that it says; raises RuntimeError when it ends instead."""
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    if not said:
        raise RuntimeError(f"{process.args!r} ended with {process.wait(_END_SECONDS)}")
    return said


def _rows(what: str, seen: Tally, share: Goal | None, wasted: Goal | None) -> list[Row]:
    how = (
        f"{seen.created} created and {seen.refused} refused within {seen.seconds:g} s, workers of two slots; at most "
        f"{seen.rate:g} a second and a burst of {seen.burst}"
    )
    provider = f"the provider's log; bucket of {seen.rate:g} a second that holds {seen.burst}"
    return [
        Row(f"creations, {what}: of the ceiling", seen.share, "%", share, how),
        Row(f"creations, {what}: refused", seen.wasted, "%", wasted, provider),
    ]
