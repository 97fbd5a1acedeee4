"""Creations against a provider that refuses more than five a second: what share of that is used, what share is wasted.

Eight worker processes of two slots each, over one Redis, with the real SDK (creator.py) against a metered provider
(tests/support/metered.py: a token bucket of five a second that holds five). Everything is read from the provider's own
log, from its first creation on, learning included. The ceiling is the rate; the bucket's burst is in nobody's favour:
it is one second's worth in each of them.
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

    @property
    def share(self) -> float:
        """Percent of the ceiling."""
        return 100 * self.created / (_CEILING * self.seconds)

    @property
    def wasted(self) -> float:
        """Percent of all creations that were refused."""
        return 100 * self.refused / max(1, self.created + self.refused)


def creation_ceiling() -> list[Row]:
    """Rows of three ways to create against the same provider."""
    exact = measure("farm", rate=_CEILING, seconds=_SECONDS)
    double = measure("farm", rate=2 * _CEILING, seconds=_SECONDS)
    unset = measure("farm", rate=0, seconds=_SECONDS)
    sdk = measure("sdk", rate=0, seconds=_SDK_SECONDS)
    return [
        *_rows("configured at the ceiling", exact, Goal(">=", 98), Goal("<=", 1)),
        *_rows("configured twice too high", double, Goal(">=", 90), Goal("<=", 3)),
        *_rows("no rate configured", unset, None, None),
        *_rows("the SDK's own retries instead", sdk, None, None),
    ]


def measure(mode: str, *, rate: float, seconds: float, burst: int = _BURST, cap: int = 1000) -> Tally:
    """Run eight workers for so long; raises RuntimeError when one failed or left something."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, ExitStack() as exits:
        directory = Path(name)
        redis_url = exits.enter_context(running_redis(directory))
        api_url = exits.enter_context(_provider(directory / "creations.jsonl", burst, cap))
        arguments = (mode, api_url, redis_url, str(rate), str(seconds))
        workers = [exits.enter_context(child("tests.bench.creator", *arguments)) for _ in range(_WORKERS)]
        for worker in workers:
            line(worker)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            if worker.wait(seconds + _END_SECONDS) != 0:
                raise RuntimeError(f"a worker ended with {worker.returncode}")
        with Redis.from_url(redis_url) as redis:
            if left := [key for key in (Keys.PERMITS, Keys.PLACES, Keys.CREATORS, Keys.OPEN) if redis.exists(key)]:
                raise RuntimeError(f"left in Redis: {left}")
        return _tally(directory / "creations.jsonl", seconds)


def _tally(log: Path, seconds: float) -> Tally:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row for row in rows if row[0] <= rows[0][0] + seconds]
    created = sum(row[1] == 201 for row in rows)
    return Tally(created, len(rows) - created, max(row[2] for row in rows), seconds)


@contextmanager
def _provider(log: Path, burst: int, cap: int) -> Iterator[str]:
    options = ("--rate", str(_CEILING), "--burst", str(burst), "--cap", str(cap), "--log", str(log))
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
        f"{seen.created} created and {seen.refused} refused within {seen.seconds:g} s, {_WORKERS} workers of two slots"
    )
    provider = f"the provider's log; bucket of {_CEILING} a second that holds {_BURST}"
    return [
        Row(f"creations, {what}: of the ceiling", seen.share, "%", share, how),
        Row(f"creations, {what}: refused", seen.wasted, "%", wasted, provider),
    ]
