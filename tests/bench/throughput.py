"""Sixty-four episodes of about eight seconds on eight workers, against one after another.

Alone, each of four episodes is timed from submission to receipt on the idle farm; 64 times their mean is what one slot
would take. Together, all 64 are submitted at once. The work is sleeping in the sandbox, as an episode that waits for
a model does, so the ratio says what the farm and its sandboxes cost, not how fast the processor is.
"""

from __future__ import annotations

import time
from statistics import mean

from orchestrator.pool import Pool
from orchestrator.records import Script, SettledReceipt
from orchestrator.tasks import load_builtin
from tests.bench.rows import Goal, Row, spread
from tests.bench.stand import farm_of

_WORKERS = 8
_SLOTS = 2 * _WORKERS
_EPISODES = 64
_ALONE = 4
_SLEEPS = ("sleep 3.8", "sleep 3.8")
"""Each below the limit of one command."""
_WAIT_SECONDS = 180.0


def throughput() -> list[Row]:
    """Rows of both ways."""
    task = load_builtin("weekly-sales")
    policy = Script(name="sleepy-repair", commands=(*_SLEEPS, *task.scripts["repair"]))
    with farm_of(_WORKERS) as farm, Pool(farm.settings) as pool:
        alone = []
        for _ in range(_ALONE):
            began = time.monotonic()
            _solved(next(pool.as_completed([pool.submit(task, policy=policy)], timeout_seconds=_WAIT_SECONDS)))
            alone.append(time.monotonic() - began)
        began = time.monotonic()
        episodes = [pool.submit(task, policy=policy) for _ in range(_EPISODES)]
        for settled in pool.as_completed(episodes, timeout_seconds=_WAIT_SECONDS):
            _solved(settled)
        together = time.monotonic() - began
    sequential = _EPISODES * mean(alone)
    return [
        Row(
            f"{_EPISODES} episodes on {_WORKERS} workers, speed-up",
            sequential / together,
            f"x of {_SLOTS}",
            Goal(">=", 14),
            f"{_EPISODES} x the mean of {_ALONE} run alone ({sequential:.0f} s) over {together:.1f} s together",
        ),
        Row("one episode alone", mean(alone), "s", None, spread(alone)),
        Row("all of them together", together, "s", None, "first submission to last receipt"),
    ]


def _solved(settled: SettledReceipt) -> None:
    if settled.receipt.reward != 1.0:
        raise RuntimeError(f"an episode ended {settled.receipt.outcome}: {settled.receipt.detail}")
