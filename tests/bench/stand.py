"""The stand: an embedded farm for one measurement, in a temporary directory, gone with its context.

What always holds: nothing of the surroundings is used (no REDIS_URL, no E2B key).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from deploy.embedded.children import end, leashed, spawn
from deploy.local_farm import LocalFarm
from orchestrator.farm import open_farm
from orchestrator.settings import Settings
from tests.support.waiting import wait_until

_READY_SECONDS = 60.0
_END_SECONDS = 30.0


@contextmanager
def farm_of(workers: int, **settings: object) -> Iterator[LocalFarm]:
    """A running farm with this many workers."""
    given = Settings.model_validate({"redis_url": None, "e2b_api_key": None, "e2b_api_url": None, **settings})
    with LocalFarm(given, workers=workers, temporary=True) as farm:
        yield farm


@contextmanager
def one_more_worker(farm: LocalFarm, module: str, *arguments: str) -> Iterator[None]:
    """A worker beside the farm's own: `python -m module ...`, alive when the block begins."""
    known = len(open_farm(farm.settings).presence.workers())
    command = leashed(sys.executable, "-m", module, *arguments)
    child = spawn(command, log=farm.logs / f"more-{known}.log", environment=farm.environment())
    try:
        await_workers(farm, known + 1)
        yield
    finally:
        end(child, seconds=_END_SECONDS)


def await_workers(farm: LocalFarm, count: int) -> None:
    """Wait until this many workers have said that they are alive."""
    presence = open_farm(farm.settings).presence
    wait_until(
        lambda: len(presence.workers()) >= count, description=f"{count} workers are alive", seconds=_READY_SECONDS
    )


def milliseconds(seconds: Sequence[float]) -> list[float]:
    """Seconds as milliseconds."""
    return [1000 * value for value in seconds]
