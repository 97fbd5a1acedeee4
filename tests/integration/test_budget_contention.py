"""Many processes spend from one budget, some are killed half-way: the cap holds at every moment and at the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal

import pytest
from redis import Redis

from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import SettledReceipt
from orchestrator.settings import Settings
from tests.support import spenders
from tests.support.bare_farm import expire, farm_settings
from tests.support.processes import ROOT, children
from tests.support.scene import Scene
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.scene"]

RUN = "run-test"
WORST = 731 * 30_250_000
CAP = 25 * WORST + 12_345
PROCESSES = 8


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=spenders.CONCURRENCY)


@contextmanager
def spending(url: str) -> Iterator[subprocess.Popen[str]]:
    """So many spenders of the run; none is left afterwards."""
    command = [sys.executable, "-m", "tests.support.spenders", url, RUN, str(PROCESSES)]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield first
    finally:
        for pid in children(first.pid):
            os.kill(pid, signal.SIGKILL)
        first.kill()
        first.communicate()


def within(farm: Farm, run: str | None) -> bool:
    """Whether spent and reserved together are within the limit; the rows are read in one command."""
    left = farm.budget.read(run).left_picousd
    assert left is not None
    assert left >= 0, f"{-left} pico-dollars too many"
    return True


def receipts(farm: Farm) -> Iterator[SettledReceipt]:
    return Receipts(farm.redis, farm.ledger.allocations).select(ReceiptFilter())


def costs(farm: Farm) -> int:
    return sum(settled.cost_picousd for settled in receipts(farm))


@pytest.mark.parametrize("whose", [RUN, None], ids=["run", "farm"])
def test_contenders_never_exceed_the_cap_and_use_it_up(farm: Farm, redis_url: str, whose: str | None) -> None:
    farm.budget.set(Decimal(CAP) / 10**12, run_id=whose)
    with spending(redis_url) as first:
        wait_until(
            lambda: within(farm, whose) and first.poll() is not None,
            description="every spender was stopped",
            seconds=90,
        )
    balance = farm.budget.read(whose)
    assert balance.reserved_picousd == 0
    assert balance.spent_picousd == costs(farm)
    assert CAP - WORST < balance.spent_picousd <= CAP, "nobody was refused while an episode could be paid for"
    outcomes = Counter(str(found.receipt.outcome) for found in receipts(farm))
    assert outcomes["budget_exhausted"] == PROCESSES
    assert outcomes["solved"] >= 25


def test_killed_spenders_keep_their_reservations_until_the_reconciler_has_settled_them(
    scene: Scene, redis_url: str, redis: Redis
) -> None:
    farm, dice = scene.farm, random.Random(11)
    farm.budget.set(Decimal(CAP) / 10**12, run_id=RUN)
    with spending(redis_url) as first:
        assert first.stdout is not None
        seen = {int(first.stdout.readline()) for _ in range(12)}
        killed = dice.sample(sorted(seen), max(1, len(seen) // 2))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: within(farm, RUN) and not set(killed) & set(children(first.pid)), description="the killed are dead"
        )
        assert farm.budget.read(RUN).spent_picousd > 0
    # and then the others as well, wherever they were
    opened = farm.ledger.open_episodes()
    held = {episode for episode in opened if redis.zscore(Keys.PERMITS, episode) is not None}
    reserved = sum(
        int(redis.hget(Keys.episode(episode), f"reserved_{role}") or 0)
        for episode in held
        for role in ("policy", "verifier")
    )
    assert farm.budget.read(RUN).reserved_picousd == reserved
    for allocation in farm.ledger.allocations.unsettled():
        if allocation.sandbox_id is not None:  # so that the provider knows what the dead had said of it
            scene.provider.running[allocation.sandbox_id] = scene.provider.running[scene.provider.add({})]
    for episode in opened:
        if redis.zscore(Keys.LEASES, episode) is None:
            farm.ledger.cancel(episode)  # it was not even taken
        else:
            expire(redis, episode)
    scene.pass_time(12.0)  # however long the killing took: whoever did not look on for a lease's time finishes nobody
    scene.round()
    within(farm, RUN)
    assert farm.ledger.open_episodes() == []
    balance = farm.budget.read(RUN)
    assert balance.reserved_picousd == 0
    assert balance.spent_picousd == costs(farm) <= CAP
