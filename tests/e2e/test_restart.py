"""The whole stack is killed in the middle of a run and started again in the same directory: the run goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from orchestrator.finished import START, Finished
from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome, Role
from tests.e2e.commands import User, user
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.processes import Marked, exists
from tests.support.redis_server import check_leaks
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider

QUICK = {"FARM_LEASE_LOST_SECONDS": "4", "FARM_LEASE_RENEW_SECONDS": "1", "FARM_RECONCILE_SECONDS": "0.5"}
EPISODES = 10


@pytest.fixture
def someone() -> Iterator[User]:
    with user() as made:
        yield made


def up(someone: User) -> Marked:
    """A farm of one worker, up."""
    process = someone.start("up", "--workers", "1", **QUICK)
    wait_until(lambda: "are up" in process.stdout, description="the farm is up", seconds=60)
    return process


def kill_all(process: Marked, redis_pid: int) -> None:
    """What a power cut does: no process of it hears anything. Redis goes first: its title hides its mark."""
    os.kill(redis_pid, signal.SIGKILL)
    while living := process.alive():
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.process.wait()
    wait_until(lambda: not exists(redis_pid), description="Redis has gone")


def test_a_run_goes_on_after_its_whole_stack_was_killed_and_started_again(someone: User) -> None:
    first = up(someone)
    found = json.loads((someone.home / ".farm" / "stack.json").read_text())
    settings = Settings(_env_file=None, redis_url=found["redis_url"])  # type: ignore[call-arg]
    with Pool(settings, run_id="run-restart") as pool:
        slow = script("sleep 1", candidate(repaired()))
        submitted = [pool.submit(weekly_sales(), policy=slow) for _ in range(EPISODES)]
        finished = Finished(pool.redis, "run-restart")
        wait_until(lambda: len(finished.after(START, 0.1)) >= 2, description="two receipts", seconds=40)
        wait_until(lambda: pool.redis.zcard(Keys.ALLOCATIONS) == 2, description="two sandboxes run", seconds=20)
        kill_all(first, pool.redis.info("server")["process_id"])

        second = up(someone)
        receipts = pool.receipts(submitted)
        outcomes = [settled.receipt.outcome for settled in receipts]
        assert set(outcomes) <= {Outcome.SOLVED, Outcome.WORKER_LOST}
        assert outcomes.count(Outcome.WORKER_LOST) <= 2, "what ran is lost, and nothing else"
        ended = [episode for _, episode in finished.after(START, 1)]
        assert sorted(ended) == sorted(episode.episode_id for episode in submitted), "each has one receipt"
        counters = pool.redis.hgetall(Keys.COUNTERS)
        assert int(counters["episodes:solved"]) == outcomes.count(Outcome.SOLVED)
        assert int(counters["episodes:worker_lost"]) == outcomes.count(Outcome.WORKER_LOST)
        for role in Role:
            rows = [row for settled in receipts for row in settled.allocations if row.role is role]
            assert int(counters[f"cost_picousd:{role}"]) == sum(row.cost_picousd or 0 for row in rows)
        assert all(row.state.settled for settled in receipts for row in settled.allocations)
        for place in (Keys.OPEN, Keys.LEASES, Keys.PERMITS, Keys.ALLOCATIONS):
            assert pool.redis.zcard(place) == 0, place
        check_leaks(pool.redis)
        service = json.loads((someone.home / ".farm" / "stack.json").read_text())
        assert E2BProvider(service["e2b_api_key"], api_url=service["e2b_api_url"]).list({}) == []
    second.interrupt_group()
    assert second.wait(30) == 0, second.stderr
