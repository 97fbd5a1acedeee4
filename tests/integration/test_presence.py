"""Heartbeats on a real Redis: who beats is alive, who stops is forgotten."""

from __future__ import annotations

import pytest
from redis import Redis

from orchestrator.keys import Keys
from orchestrator.presence import Presence, WorkerRow, slot_name
from tests.support.clocked import age_by_step
from tests.support.waiting import wait_until


@pytest.fixture
def presence(redis: Redis) -> Presence:
    """Heartbeats that are soon over."""
    return Presence(redis, slot_seconds=0.3, trainer_seconds=0.8)


@pytest.fixture
def lasting(redis: Redis) -> Presence:
    """Heartbeats that outlast a test."""
    return Presence(redis, slot_seconds=30, trainer_seconds=30)


def row(worker_id: str = "w1") -> WorkerRow:
    return WorkerRow(worker_id, "host-a", 4711, "running", 2, "http://127.0.0.1:1")


def test_a_worker_is_listed_as_it_described_itself(lasting: Presence) -> None:
    lasting.beat_worker(row("w2"), ["w2-1"])
    lasting.beat_worker(row("w1"), [])
    assert lasting.workers() == [row("w1"), row("w2")]


def test_a_worker_that_stops_beating_is_forgotten_with_its_slots(presence: Presence, redis: Redis) -> None:
    presence.beat_worker(row("w1"), ["w1-1", "w1-2"])
    wait_until(lambda: presence.workers() == [], description="the worker is forgotten")
    presence.beat_worker(row("w2"), ["w2-1"])
    assert redis.zrange(Keys.SLOTS, 0, -1) == ["w2-1"]
    assert redis.zrange(Keys.WORKERS, 0, -1) == ["w2"]


def test_a_worker_that_leaves_is_forgotten_at_once(lasting: Presence, redis: Redis) -> None:
    lasting.beat_worker(row("w1"), ["w1-1"])
    lasting.beat_worker(row("w2"), ["w2-1"])
    lasting.remove_worker("w1", ["w1-1"])
    lasting.remove_worker("w1", [])
    assert lasting.workers() == [row("w2")]
    assert redis.zrange(Keys.SLOTS, 0, -1) == ["w2-1"]


def test_a_trainer_is_alive_while_it_beats(presence: Presence) -> None:
    assert not presence.trainer_alive("t1")
    presence.beat_trainer("t1")
    assert presence.trainer_alive("t1")
    assert not presence.trainer_alive("t2")
    wait_until(lambda: not presence.trainer_alive("t1"), description="the heartbeat is gone")


def test_one_trainer_at_a_time_drives_a_run(presence: Presence) -> None:
    assert presence.claim_left_seconds("run-1") == 0
    assert presence.claim_run("run-1", "t1")
    assert 0 < presence.claim_left_seconds("run-1") <= 0.8
    assert not presence.claim_run("run-1", "t2")
    assert presence.claim_run("run-2", "t2")
    wait_until(lambda: presence.claim_left_seconds("run-1") < 0.7, description="some of it is over")
    shorter = presence.claim_left_seconds("run-1")
    assert presence.claim_run("run-1", "t1"), "again"
    assert presence.claim_left_seconds("run-1") > shorter
    presence.release_run("run-1", "t2")
    assert not presence.claim_run("run-1", "t2")
    presence.release_run("run-1", "t1")
    assert presence.claim_run("run-1", "t2")
    wait_until(lambda: presence.claim_run("run-1", "t1"), description="a claim that is not renewed ends")


def test_a_draining_workers_slots_are_no_capacity_any_more(lasting: Presence, redis: Redis) -> None:
    lasting.beat_worker(row("w1"), [slot_name("w1", 1), slot_name("w1", 2)])
    lasting.beat_worker(row("w1-1"), [slot_name("w1-1", 1)])
    lasting.beat_worker(row("w1"), [])
    assert redis.zrange(Keys.SLOTS, 0, -1) == ["w1-1-1"]


def test_a_slot_is_that_of_its_worker_whatever_its_id_ends_in(lasting: Presence) -> None:
    lasting.beat_worker(row("w1"), [slot_name("w1", 1), slot_name("w1", 2)])
    lasting.beat_worker(row("w1-1"), [slot_name("w1-1", 1)])
    assert lasting.workers_of(lasting.live_slots()) == [row("w1"), row("w1-1")]
    assert lasting.taking("host-a") == ["w1", "w1-1"]
    assert lasting.taking("host-b") == []


# after a step back of Redis's clock


def test_slots_of_before_a_step_are_gone_after_their_time(presence: Presence, redis: Redis) -> None:
    presence.beat_worker(row("w1"), ["w1-1"])
    age_by_step(redis, Keys.SLOTS)
    presence.beat_worker(row("w2"), [])
    wait_until(lambda: presence.live_slots() == [], description="the other's slot is gone")
    assert presence.drop_dead_slots() == 1


def test_a_worker_of_before_a_step_is_gone_after_its_time(presence: Presence, redis: Redis) -> None:
    presence.beat_worker(row("w1"), [])
    age_by_step(redis, Keys.worker("w1"))
    age_by_step(redis, Keys.WORKERS)
    assert presence.workers() == [row("w1")]
    wait_until(lambda: presence.workers() == [], description="the worker is forgotten")
    presence.beat_worker(row("w2"), [])
    wait_until(lambda: presence.workers() == [], description="so is the other")
    presence.beat_worker(row("w3"), [])
    assert redis.zrange(Keys.WORKERS, 0, -1) == ["w3"]


def test_a_trainer_of_before_a_step_is_lost_after_its_time(presence: Presence, redis: Redis) -> None:
    presence.beat_trainer("t1")
    age_by_step(redis, Keys.trainer("t1"))
    assert presence.lost_trainers(["t1", "t2"]) == {"t2"}, "the living have the time to say so"
    wait_until(lambda: presence.lost_trainers(["t1"]) == {"t1"}, description="the heartbeat is gone")
    assert not presence.trainer_alive("t1")


def test_a_claim_of_before_a_step_ends_after_its_time(presence: Presence, redis: Redis) -> None:
    assert presence.claim_run("run-1", "t1")
    age_by_step(redis, Keys.driver("run-1"))
    assert 0 < presence.claim_left_seconds("run-1") <= 0.8
    age_by_step(redis, Keys.driver("run-1"))
    wait_until(lambda: presence.claim_run("run-1", "t2"), description="the claim has ended")
    presence.release_run("run-1", "t1")
    assert not presence.claim_run("run-1", "t1"), "it is t2's"


def test_a_claim_is_given_its_own_life_by_one_who_believes_in_a_shorter(
    presence: Presence, lasting: Presence, redis: Redis
) -> None:
    assert lasting.claim_run("run-1", "t1")
    age_by_step(redis, Keys.driver("run-1"))
    assert not presence.claim_run("run-1", "t2")
    assert 20 < lasting.claim_left_seconds("run-1") <= 30
