"""Ends that come from outside a real worker: a cancelled run, a killed trainer process, a drain that takes too long."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.vocabulary import EpisodeState, Outcome, job_id
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.line import PROMPT_SECONDS
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.processes import Marked, worker_environment
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.farm"]

QUICK: dict[str, Any] = {
    "trainer_lost_seconds": 2,
    "trainer_beat_seconds": 0.5,
    "lease_lost_seconds": 4,
    "lease_renew_seconds": 1,
}

TRAINER = """
import time
from orchestrator.pool import Pool
from orchestrator.settings import load_settings
from orchestrator.tasks import load_builtin

with Pool(load_settings(), run_id="run-killed") as pool:
    episodes = [pool.submit(load_builtin("weekly-sales")) for _ in range(6)]
    for episode in episodes[:2]:
        episode.reset()
    print(*pool.submitted, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def pool(field: Field) -> Iterator[Pool]:
    with Pool(field.settings, run_id="run-test") as opened:
        yield opened


def test_a_cancelled_run_leaves_receipts_that_say_so_and_no_sandbox(field: Field, pool: Pool) -> None:
    field.worker()
    remote = pool.submit(weekly_sales())
    remote.reset()
    scripted = pool.submit(weekly_sales(), policy=script(*["sleep 1"] * 25))
    field.policy_sandbox(scripted.episode_id)
    waiting = [pool.submit(weekly_sales(), policy=script()) for _ in range(4)]
    with Pool(field.settings, run_id="run-other") as other:
        survivor = other.submit(weekly_sales(), policy=script(candidate(repaired())))
        ending = pool.cancel(wait_seconds=20)
        assert (ending.outcomes, ending.complete) == ({"cancelled": 6}, True)
        for episode in (remote, scripted):
            field.check_ended(episode.episode_id, Outcome.CANCELLED)
        for episode in waiting:
            field.check_ended(episode.episode_id, Outcome.CANCELLED, roles=())
        assert survivor.wait(20).outcome is Outcome.SOLVED
    assert field.farm.redis.zcard(Keys.PERMITS) == 0


def test_a_killed_trainer_process_ends_its_running_and_its_queued_episodes(ground: Ground, tmp_path: Path) -> None:
    with open_field(ground, **QUICK) as field:
        field.worker()
        field.reconcile(0.5)
        program = [sys.executable, "-c", TRAINER]
        trainer = Marked(
            program, environment=worker_environment(field.settings), cwd=tmp_path, output=tmp_path / "trainer"
        )
        field.exits.callback(trainer.end)
        wait_until(lambda: trainer.stdout.endswith("\n"), description="two of six episodes run", seconds=30)
        submitted = trainer.stdout.split()
        with Pool(field.settings) as pool:
            alone = pool.submit(weekly_sales(), policy=script(candidate(repaired())))
            os.kill(trainer.pid, signal.SIGKILL)
            for episode_id in submitted:
                field.wait_receipt(episode_id, 30)
            for episode_id in submitted[:2]:
                field.check_ended(episode_id, Outcome.TRAINER_LOST)
            for episode_id in submitted[2:]:
                field.check_ended(episode_id, Outcome.TRAINER_LOST, roles=())
            assert alone.wait(20).outcome is Outcome.SOLVED, "what needs no trainer goes on"
        assert field.farm.redis.zcard(Keys.PERMITS) == 0
        assert field.farm.queue.depth() == 0


def test_a_cancelled_episode_that_waits_for_its_permit_ends_without_waiting_longer(ground: Ground) -> None:
    with open_field(ground, concurrency_limit=1) as field, Pool(field.settings) as pool:
        redis = field.farm.redis
        redis.zadd(Keys.PERMITS, {"e-other": 1})
        field.worker()
        episode = pool.submit(weekly_sales(), policy=script())
        wait_until(lambda: redis.zscore(Keys.WAITERS, episode.episode_id), description="it waits in line")
        assert pool.cancel(wait_seconds=PROMPT_SECONDS).complete
        field.check_ended(episode.episode_id, Outcome.CANCELLED, roles=())
        redis.zrem(Keys.PERMITS, "e-other")


def test_an_episode_longer_than_the_drain_deadline_is_closed_in_order_and_the_worker_ends(ground: Ground) -> None:
    with open_field(ground, drain_seconds=1) as field, Pool(field.settings) as pool:
        worker = field.worker()
        endless = pool.submit(weekly_sales(), policy=script(*["sleep 1"] * 28))
        field.policy_sandbox(endless.episode_id)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0, worker.stderr
        assert worker.alive() == []
        field.check_ended(endless.episode_id, Outcome.CANCELLED)
        receipt = field.receipt(endless.episode_id).receipt
        assert "drain time is over" in (receipt.detail or "")
        assert field.farm.presence.workers() == []


def test_an_episode_that_still_waits_for_its_permit_goes_back_to_the_queue(ground: Ground) -> None:
    with open_field(ground, drain_seconds=0.5, concurrency_limit=1) as field, Pool(field.settings) as pool:
        redis = field.farm.redis
        redis.zadd(Keys.PERMITS, {"e-other": 1})
        first = field.worker("w1")
        episode = pool.submit(weekly_sales(), policy=script(candidate(repaired())))
        wait_until(lambda: redis.zscore(Keys.WAITERS, episode.episode_id), description="it waits in line")
        first.process.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0, first.stderr
        row = field.farm.ledger.row(episode.episode_id)
        assert row is not None
        assert (row.state, row.attempt) == (EpisodeState.QUEUED, 2)
        assert field.farm.queue.waiting() == {job_id(episode.episode_id, 2)}
        redis.zrem(Keys.PERMITS, "e-other")
        field.worker("w2")
        assert episode.wait(20).outcome is Outcome.SOLVED
        field.check_ended(episode.episode_id, Outcome.SOLVED, roles=("policy", "verifier"))


def test_a_running_group_is_cancelled_and_no_other(field: Field, pool: Pool) -> None:
    field.worker()
    long = script(*["sleep 1"] * 25)
    ours = pool.submit(weekly_sales(), policy=long, group_id="g-1")
    other = pool.submit(weekly_sales(), policy=script("sleep 1.5", candidate(repaired())), group_id="g-2")
    for episode in (ours, other):
        field.policy_sandbox(episode.episode_id)
    assert pool.cancel(group_id="g-1").outcomes == {"cancelled": 1}
    field.check_ended(ours.episode_id, Outcome.CANCELLED)
    assert other.wait(30).outcome is Outcome.SOLVED


def test_a_horse_that_rq_kills_for_its_time_leaves_one_receipt_and_nothing_else(ground: Ground) -> None:
    with open_field(ground, **QUICK) as field, Pool(field.settings) as pool:
        field.reconcile(0.5)
        episode = pool.submit(weekly_sales(), policy=script(*["sleep 1.5"] * 12))
        field.farm.redis.hset(f"rq:job:{job_id(episode.episode_id, 1)}", "timeout", 3)
        field.worker()
        field.wait_receipt(episode.episode_id, 40)
        wait_until(lambda: not field.farm.ledger.allocations.unsettled(), description="settled", seconds=20)
        field.check_ended(episode.episode_id, Outcome.WORKER_LOST)
        after = pool.submit(weekly_sales(), policy=script(candidate(repaired())))
        assert after.wait(30).outcome is Outcome.SOLVED
