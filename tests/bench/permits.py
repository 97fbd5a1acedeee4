"""Permits: how many are taken and freed a second by 32 contending processes, and how fair the line is.

Speed, limit not binding: `admit` of the real limiter, and what frees the permit. In production that is the script that
writes the receipt, which does a dozen other things; it is measured with it, and with the lines that free the permit
alone. Fairness, limit binding: in which order permits were given against the order in which they were asked for. How
many held one at once is read from the processes' own times, so it is counted from outside of the limiter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

from redis import Redis

from orchestrator.keys import Keys
from tests.bench.contender import contend, names
from tests.bench.rows import Goal, Row
from tests.support.bare_farm import a_spec, leased, opened_farm
from tests.support.redis_server import running_redis

_PROCESSES = 32
_PAIRS = 400
_RECEIPTS = 100
_TURNS = 40
_BINDING = 8
_HOLDS = 10
_HOLD_SECONDS = 0.02
"""Where a permit is kept: long enough for others to be granted theirs meanwhile."""


@dataclass(frozen=True)
class Contest:
    """What all processes measured together."""

    pairs_per_second: float
    pair_cpu_seconds: float
    """Processor time of one pair, Redis's and its clients' together: other load on the machine is not in it."""
    waits: Sequence[tuple[float, float]]
    """(asked, granted) in unix seconds, by the time of asking."""
    most_at_once: int
    """Permits that were surely held at the same moment."""


def permits(
    *, processes: int = _PROCESSES, pairs: int = _PAIRS, receipts: int = _RECEIPTS, turns: int = _TURNS
) -> list[Row]:
    """Rows of speed and of fairness."""
    pair = contest("pair", limit=1000, count=pairs, processes=processes)
    receipt = contest("receipt", limit=1000, count=receipts, processes=processes)
    tight = contest("receipt", limit=_BINDING, count=turns, processes=processes)
    held = contest("receipt", limit=_BINDING, count=_HOLDS, processes=processes, hold_seconds=_HOLD_SECONDS)
    waited = sorted(granted - asked for asked, granted in tight.waits)
    return [
        Row(
            f"permits: taken and freed, {processes} processes",
            pair.pairs_per_second,
            "/s",
            Goal(">=", 5000),
            f"{processes} processes, {pairs} each; admit, and the lines of commit_receipt.lua that free it",
        ),
        Row(
            "permits: processor time of one such pair",
            1e6 * pair.pair_cpu_seconds,
            "us",
            None,
            "Redis and its clients together, whatever else the machine does; cores over this is the most a second",
        ),
        Row(
            "permits: taken, and freed by a receipt",
            receipt.pairs_per_second,
            "/s",
            None,
            f"{processes} processes, {receipts} each; admit and commit_receipt with all that it writes",
        ),
        Row(
            "permits, limit binding: longest wait over median",
            waited[-1] / median(waited),
            "x",
            None,
            f"{processes} processes for {_BINDING} permits; p50 {1000 * median(waited):.1f} ms, "
            f"longest {1000 * waited[-1]:.1f} ms",
        ),
        Row(
            "permits, limit binding: given out of order",
            100 * overtaken(tight.waits, slack_seconds=0.005) / len(tight.waits),
            "%",
            None,
            "granted more than 5 ms before one that had asked more than 5 ms earlier; times of the processes",
        ),
        Row("permits, limit binding: given a second", tight.pairs_per_second, "/s", None, "each on by a receipt"),
        Row(
            "permits, limit binding: most held at once",
            held.most_at_once,
            "",
            Goal("<=", _BINDING),
            f"each kept {1000 * _HOLD_SECONDS:g} ms; counted from after a grant to before its receipt",
        ),
    ]


def overtaken(waits: Sequence[tuple[float, float]], *, slack_seconds: float) -> int:
    """How many were granted clearly before somebody who had clearly asked earlier."""
    count = 0
    ordered = sorted(waits)
    for number, (asked, granted) in enumerate(ordered):
        earlier = (other for other in reversed(ordered[:number]) if other[0] < asked - slack_seconds)
        count += any(other[1] > granted + slack_seconds for other, _ in zip(earlier, range(200), strict=False))
    return count


def most_at_once(holds: Iterable[tuple[float, float]]) -> int:
    """How many of these stretches (began, ended) have a moment in common; one that ends as another begins has none."""
    changes = sorted(change for began, ended in holds for change in ((began, 1), (ended, -1)))
    return max(accumulate((change for _, change in changes), initial=0))


def contest(mode: str, *, limit: int, count: int, processes: int = _PROCESSES, hold_seconds: float = 0.0) -> Contest:
    """Let all contend at once; raises RuntimeError when one failed, a permit is left or too many were held."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, running_redis(Path(name)) as redis_url:
        with opened_farm(redis_url) as farm:
            for process in range(processes):
                for episode in names(f"p{process}", count):
                    leased(farm, a_spec(episode), lease_seconds=3600)
        with Redis.from_url(redis_url) as redis:
            before = _cpu_seconds(redis)
            shares = contend(processes, mode, redis_url, limit=limit, count=count, hold_seconds=hold_seconds)
            cpu = _cpu_seconds(redis) - before + sum(one.cpu_seconds for one in shares)
            if redis.zcard(Keys.PERMITS) or redis.zcard(Keys.WAITERS):
                raise RuntimeError("a permit or a waiter is left")
    # with the stretches at both ends in which not all contend: never better than it was
    took = max(one.ended for one in shares) - min(one.began for one in shares)
    waits = sorted((asked, granted) for one in shares for asked, granted, _ in one.holds)
    most = most_at_once((granted, let_go) for one in shares for _, granted, let_go in one.holds)
    if most > limit:
        raise RuntimeError(f"{most} permits were held at once under a limit of {limit}")
    return Contest(len(waits) / took, cpu / len(waits), waits, most)


def _cpu_seconds(redis: Redis) -> float:
    used = redis.info("cpu")
    return float(used["used_cpu_sys"]) + float(used["used_cpu_user"])
