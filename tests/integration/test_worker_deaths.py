"""Processes that are killed: what they were running is aborted, everything of it vanishes, the rest goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.errors import InfrastructureLost
from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.processes import exists
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.farm"]

QUICK: dict[str, Any] = {"lease_lost_seconds": 4, "lease_renew_seconds": 1, "drain_seconds": 1}
"""A third of the default times: a lease lasts as many renewals, a slot that is late on a busy machine keeps it."""
ROUND_SECONDS = 0.5
RECOVERY_SECONDS = 12
"""From a kill to the receipt: a lease, a round, and time for the work itself."""


def horse_of(field: Field, episode_id: str) -> int:
    """The pid of the work horse that holds an episode's lease."""
    wait_until(lambda: field.farm.redis.hget(Keys.episode(episode_id), "owner"), description="an owner")
    return int(str(field.farm.redis.hget(Keys.episode(episode_id), "owner")).split("-")[-2])


def solve_one(field: Field, pool: Pool) -> None:
    """The farm still works."""
    episode = pool.submit(weekly_sales(), policy=script(candidate(repaired())))
    assert episode.wait(30).outcome is Outcome.SOLVED
    field.check_ended(episode.episode_id, Outcome.SOLVED, roles=("policy", "verifier"))


@pytest.fixture
def field(ground: Ground) -> Iterator[Field]:
    """A farm with short leases."""
    with open_field(ground, **QUICK) as opened:
        yield opened


def test_whatever_is_killed_is_finished_by_the_reconciler_within_seconds(field: Field) -> None:
    field.reconcile(ROUND_SECONDS)
    first, second = field.start_worker("w1"), field.start_worker("w2")
    first.wait_ready()
    second.wait_ready()
    with Pool(field.settings) as pool:
        episodes = [pool.submit(weekly_sales()) for _ in range(4)]
        for episode in episodes:
            episode.reset()
        horses = {horse_of(field, episode.episode_id) for episode in episodes}
        slots = {horse: slot for slot in first.slots().values() for horse in first.horses_of(slot)}
        killed, orphaned = sorted(slots)
        assert {killed, orphaned} < horses

        os.kill(killed, signal.SIGKILL)
        os.kill(slots[orphaned], signal.SIGKILL)
        second.process.kill()

        wait_until(lambda: not second.alive(), description="the supervisor's children are gone with it")
        wait_until(lambda: not exists(orphaned), description="the horse is gone with its slot")
        for episode in episodes:
            field.wait_receipt(episode.episode_id, RECOVERY_SECONDS)
        for episode in episodes:
            field.check_ended(episode.episode_id, Outcome.WORKER_LOST)
            with pytest.raises(InfrastructureLost):
                episode.terminal("true")
        wait_until(lambda: len(first.slots()) == 2, description="the killed slot is replaced")
        solve_one(field, pool)
    assert field.farm.redis.zcard(Keys.PERMITS) == 0


@pytest.fixture(scope="module")
def quick(ground: Ground) -> Iterator[Field]:
    """A farm with short leases and one worker."""
    with open_field(ground, own_database=True, **QUICK) as field:
        field.reconcile(ROUND_SECONDS)
        field.worker()
        yield field


def test_a_horse_that_slept_through_its_lease_writes_nothing(quick: Field) -> None:
    with Pool(quick.settings) as pool:
        episode = pool.submit(weekly_sales())
        episode.reset()
        horse = horse_of(quick, episode.episode_id)
        os.kill(horse, signal.SIGSTOP)
        quick.wait_receipt(episode.episode_id, RECOVERY_SECONDS)
        before = quick.check_ended(episode.episode_id, Outcome.WORKER_LOST)
        os.kill(horse, signal.SIGCONT)
        wait_until(lambda: not exists(horse), description="the horse has noticed and left")
        assert quick.check_ended(episode.episode_id, Outcome.WORKER_LOST) == before
        solve_one(quick, pool)


def test_a_killed_terminus_server_is_replaced_and_only_what_it_ran_is_lost(quick: Field) -> None:
    (worker,) = quick.workers
    with Pool(quick.settings) as pool:
        episode = pool.submit(weekly_sales())
        episode.reset()
        server = worker.terminus()
        assert server is not None
        os.kill(server, signal.SIGKILL)
        with pytest.raises(InfrastructureLost) as caught:
            episode.terminal("true")
        assert caught.value.outcome is Outcome.TRANSPORT
        quick.check_ended(episode.episode_id, Outcome.TRANSPORT)
        wait_until(lambda: worker.terminus() not in (None, server), description="a new server")
        solve_one(quick, pool)
        assert worker.process.poll() is None


def test_a_terminus_server_that_hangs_is_replaced(ground: Ground) -> None:
    """Its slots would take one episode after another, and end each as `transport`."""
    with open_field(ground, own_database=True, **QUICK, terminus_hung_seconds=3) as field, Pool(field.settings) as pool:
        worker = field.worker()
        server = worker.terminus()
        assert server is not None
        solve_one(field, pool)
        os.kill(server, signal.SIGSTOP)
        wait_until(lambda: not exists(server), description="it was killed", seconds=20)
        wait_until(lambda: worker.terminus() is not None, description="a new server")
        solve_one(field, pool)


def test_a_terminus_server_replaced_while_an_episode_waits_for_its_permit_costs_nothing(quick: Field) -> None:
    (worker,) = quick.workers
    redis = quick.farm.redis
    redis.hset(Keys.LIMITS, "concurrency", 1)
    redis.zadd(Keys.PERMITS, {"e-other": 1})
    try:
        with Pool(quick.settings) as pool:
            episode = pool.submit(weekly_sales(), policy=script(candidate(repaired())))
            wait_until(lambda: redis.zscore(Keys.WAITERS, episode.episode_id), description="it waits")
            server = worker.terminus()
            assert server is not None
            os.kill(server, signal.SIGKILL)
            wait_until(lambda: worker.terminus() not in (None, server), description="a new server")
            redis.hdel(Keys.LIMITS, "concurrency")
            assert episode.wait(30).outcome is Outcome.SOLVED
            quick.check_ended(episode.episode_id, Outcome.SOLVED, roles=("policy", "verifier"))
    finally:
        redis.hdel(Keys.LIMITS, "concurrency")
        redis.zrem(Keys.PERMITS, "e-other")


def test_a_stopped_trainer_process_loses_its_episodes(quick: Field) -> None:
    settings = quick.settings.model_copy(update={"trainer_lost_seconds": 1, "trainer_beat_seconds": 3600})
    with Pool(settings) as pool:
        episode = pool.submit(weekly_sales())
        quick.wait_receipt(episode.episode_id)
        quick.check_ended(
            episode.episode_id, Outcome.TRAINER_LOST, roles=["policy"] * len(quick.events(episode.episode_id)[:1])
        )
