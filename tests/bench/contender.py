"""Processes that contend for permits, forked from one that has imported everything.

What each measures it writes to its own end of a pipe: when it began and ended, and each hold. `receipt`: permit and
receipt, as an episode ends; the rows it needs are there already. `pair`: permit, and what a receipt does to free it.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from multiprocessing.synchronize import Barrier
from typing import Any

from orchestrator.keys import Keys
from orchestrator.limiter import Limiter
from tests.support.bare_farm import a_receipt, a_spec, opened_farm

_RELEASE = """
if free_permit(ARGV[1], KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], ARGV[2]) == 1 then
  wake_line(KEYS[6], KEYS[7], ARGV[2])
end
"""
"""The lines of commit_receipt.lua that free a permit."""

_START_SECONDS = 60.0
_RUN_SECONDS = 120.0


@dataclass(frozen=True)
class Share:
    """What one process measured; unix seconds."""

    began: float
    ended: float
    cpu_seconds: float
    """Processor time of this process in between."""
    holds: Sequence[tuple[float, float, float]]
    """(asked, granted, let go): surely held between the last two, taken after the grant and before the release."""


def contend(processes: int, mode: str, redis_url: str, *, limit: int, count: int, hold_seconds: float) -> list[Share]:
    """Let so many processes take and free `count` permits each, all at once; raises RuntimeError when one fails.

    Each permit is kept for `hold_seconds`.
    """
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(processes)
    running = []
    for number in range(processes):
        ours, theirs = fork.Pipe(duplex=False)
        given = (mode, redis_url, limit, count, hold_seconds, f"p{number}")
        process = fork.Process(target=_main, args=(theirs, barrier, *given))
        process.start()
        theirs.close()
        running.append((process, ours))
    shares = []
    for process, ours in running:
        try:
            shares.append(Share(**json.loads(ours.recv_bytes())))
        except EOFError:
            raise RuntimeError("a contending process failed") from None
        finally:
            process.join(_RUN_SECONDS)
            process.kill()
    return shares


def names(process: str, count: int) -> list[str]:
    """The episodes of one process."""
    return [f"e-{process}-{number}" for number in range(count)]


def _main(
    pipe: Any, barrier: Barrier, mode: str, redis_url: str, limit: int, count: int, hold_seconds: float, name: str
) -> None:
    holds = []
    with opened_farm(redis_url, concurrency_limit=limit) as farm:
        episodes = names(name, count)
        receipts = [a_receipt(a_spec(episode)) for episode in episodes] if mode == "receipt" else []
        tokens = [str(farm.redis.hget(Keys.episode(episode), "token")) for episode in episodes]
        prelude = files("orchestrator.scripts").joinpath("_limits.lua").read_text(encoding="utf-8")
        release = farm.redis.script_load(prelude + _RELEASE)
        keys = [Keys.PERMITS, Keys.PLACES, Keys.LIMITS, Keys.CREATORS, Keys.CREATORS_DUE, Keys.WAITERS]
        keys.append(Keys.BATCHES)
        barrier.wait(_START_SECONDS)
        began, cpu = time.time(), time.process_time()
        for number, episode in enumerate(episodes):
            asked, granted = _admit(farm.limiter, episode)
            time.sleep(hold_seconds)
            holds.append((asked, granted, time.time()))
            if mode == "receipt":
                farm.ledger.commit(receipts[number], tokens[number])
            else:
                farm.redis.evalsha(release, len(keys), *keys, episode, Keys.WAKE_PREFIX)
        ended, cpu = time.time(), time.process_time() - cpu
    pipe.send_bytes(json.dumps({"began": began, "ended": ended, "cpu_seconds": cpu, "holds": holds}).encode())


def _admit(limiter: Limiter, episode: str) -> tuple[float, float]:
    asked = time.time()
    limiter.admit(episode, reservation_id=None, wait_seconds=60, check=_nothing)
    return asked, time.time()


def _nothing() -> None:
    """Nothing ends an episode early here."""
