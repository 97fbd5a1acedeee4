"""How long it takes until everything of a worker that was killed with -9 is settled, with the default settings.

From the kill of a worker with two live episodes to the last of their receipts with every sandbox confirmed absent: a
lease has to run out, a round of the reconciler has to see it. Another worker goes on, the killed one is replaced.
"""

from __future__ import annotations

import os
import signal
import time

from deploy.commands.resolve import is_running
from orchestrator.farm import open_farm
from orchestrator.pool import Pool
from orchestrator.records import SettledReceipt
from orchestrator.tasks import load_builtin
from orchestrator.vocabulary import Outcome
from tests.bench.rows import Goal, Row, spread
from tests.bench.stand import farm_of, wait_until

_ROUNDS = 3
_WORKERS = 2
_SLOTS = 2
"""Of each worker."""


def worker_loss() -> list[Row]:
    """One row: the slowest episode of all rounds."""
    seconds: list[float] = []
    with farm_of(_WORKERS) as farm, Pool(farm.settings) as pool:
        for _ in range(_ROUNDS):
            wait_until(lambda: pool.capacity().free == _WORKERS * _SLOTS, "every slot is free")
            seconds += _lose(pool)
    lease, every = farm.settings.lease_lost_seconds, farm.settings.reconcile_seconds
    how = f"{spread(seconds)}; lease {lease:g} s, a round every {every:g} s"
    return [Row("a worker killed with -9 is settled within", max(seconds), "s", Goal("<=", 20), how)]


def _lose(pool: Pool) -> list[float]:
    """Fill all workers, kill one; seconds until each of its episodes was settled."""
    episodes = [pool.submit(load_builtin("weekly-sales")) for _ in range(_WORKERS * _SLOTS)]
    for episode in episodes:
        episode.reset()
    rows = open_farm(pool.settings).presence.workers()
    victim = next(row for row in rows if is_running(row.pid))  # a killed one is listed for a while
    os.kill(victim.pid, signal.SIGKILL)
    began = time.monotonic()
    done: dict[str, float] = {}

    def settled() -> bool:
        for episode in episodes:
            found = pool.ledger.receipt(episode.episode_id)
            if found is not None and episode.episode_id not in done and _over(found):
                done[episode.episode_id] = time.monotonic() - began
        return len(done) == _SLOTS

    wait_until(settled, f"the episodes of {victim.worker_id} are settled")
    for episode in episodes:
        episode.close()
    return list(done.values())


def _over(found: SettledReceipt) -> bool:
    if found.receipt.outcome is not Outcome.WORKER_LOST:
        raise RuntimeError(f"an episode ended {found.receipt.outcome}: {found.receipt.detail}")
    return all(row.state.settled for row in found.allocations)
