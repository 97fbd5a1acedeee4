"""Batches of a pool: reserved whole, refused when they can never be, given back; over slots without sandboxes."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
from redis import Redis

from orchestrator.errors import CapacityError, NeverFits, PlacesTaken
from orchestrator.keys import Keys
from orchestrator.limiter import Admission
from orchestrator.pool import Pool
from orchestrator.presence import WorkerRow
from orchestrator.records import Script
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import TASK, TinySlot, a_receipt, admit, beat_slots, farm_settings, leased, opened_farm
from tests.support.waiting import wait_until

SCRIPT = Script(commands=("true",))


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=4)


def test_a_batch_is_reserved_run_and_given_back(pool: Pool, redis_url: str, settings: Settings) -> None:
    with TinySlot(settings, "slot-a"), TinySlot(settings, "slot-b"):
        with pool.reserve(2) as batch:
            assert pool.capacity().free == 0
            episodes = [pool.submit(TASK, policy=SCRIPT, reservation=batch) for _ in range(2)]
            assert all(s.receipt.outcome is Outcome.SOLVED for s in pool.receipts(episodes))
        wait_until(lambda: pool.capacity().free == 2, description="everything is given back")


def test_what_a_batch_did_not_use_is_given_back_when_its_block_ends(pool: Pool, redis_url: str) -> None:
    with opened_farm(redis_url, concurrency_limit=4) as farm:
        beat_slots(farm, 4)
        with pool.reserve(3):
            assert pool.capacity().reserved == 3
        assert pool.capacity().reserved == 0


def test_a_reservation_that_is_over_takes_no_episode(pool: Pool, redis_url: str, redis: Redis) -> None:
    """Without its place an episode would wait in line while the others of its batch wait for it."""
    with opened_farm(redis_url, concurrency_limit=4) as farm:
        beat_slots(farm, 4)
        places = pool.reserve(2)
        first = pool.submit(TASK, reservation=places, episode_id="e-first")
        places.release()
        with pytest.raises(PlacesTaken, match=r"nothing is left of this reservation of 2.* reserve again"):
            pool.submit(TASK, reservation=places, episode_id="e-late")
        assert farm.ledger.row("e-late") is None
        pool.forget(first)
        assert pool.submit(TASK, reservation=places, episode_id="e-first").episode_id == "e-first", "the same again"


def test_places_are_kept_from_the_last_submission_on(pool: Pool, redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, concurrency_limit=4) as farm:
        beat_slots(farm, 4)
        places = pool.reserve(2)
        left, _, total, life = cast(str, redis.hget(Keys.RESERVATIONS, places.reservation_id)).split(":")
        now = int(farm.ledger.now() * 1000)
        redis.hset(Keys.RESERVATIONS, places.reservation_id, f"{left}:{now + 5_000}:{total}:{life}")
        pool.submit(TASK, reservation=places)
        left, ends, _, _ = cast(str, redis.hget(Keys.RESERVATIONS, places.reservation_id)).split(":")
        assert int(ends) >= now + int(life)
        assert left == "2", "the place is drawn with the permit"


def test_slots_of_another_queue_are_no_places_of_this_one(pool: Pool, redis_url: str, redis: Redis) -> None:
    """A farm's queues share its limit; an episode is taken by the workers of its own only."""
    with opened_farm(redis_url, concurrency_limit=4) as farm:
        beat_slots(farm, 2)
        other = WorkerRow("worker-other", "here", 1, "running", 2, "http://127.0.0.1:1", queue="other")
        farm.presence.beat_worker(other, ["worker-other-1", "worker-other-2"])
        assert farm.limiter.capacity().live_slots == pool.capacity().live_slots + 2 == 4
        with pytest.raises(NeverFits, match="2 slots are live: add 1 worker"):
            pool.reserve(3)
        theirs, lease = leased(farm)
        assert admit(farm, theirs.episode_id) is Admission.GRANTED
        assert pool.capacity().free == 1, "it holds a slot of ours"
        with pytest.raises(PlacesTaken, match="2 places wanted, 1 free now"):
            pool.reserve(2)
        redis.hset(Keys.episode(theirs.episode_id), "queue", "other")
        assert (pool.capacity().permits, pool.capacity().free) == (1, 2), "it holds one of theirs"
        with pool.reserve(2):
            assert pool.capacity().free == 0
        farm.ledger.commit(a_receipt(theirs), lease.token)


def test_other_queues_workers_may_leave_while_a_batch_waits(pool: Pool, redis_url: str) -> None:
    with opened_farm(redis_url, concurrency_limit=4) as farm:
        beat_slots(farm, 2)
        other = WorkerRow("worker-other", "here", 1, "running", 2, "http://127.0.0.1:1", queue="other")
        farm.presence.beat_worker(other, ["worker-other-1", "worker-other-2"])
        held = pool.reserve(1)
        gone = ("worker-other", ["worker-other-1", "worker-other-2"])
        threading.Timer(0.2, farm.presence.remove_worker, gone).start()
        threading.Timer(0.4, held.release).start()
        with pool.reserve(2, wait_seconds=10):
            assert pool.capacity().reserved == 2


@pytest.mark.parametrize("count", [0, -1])
def test_a_batch_of_nothing_is_refused(pool: Pool, count: int) -> None:
    with pytest.raises(CapacityError):
        pool.reserve(count)


@pytest.mark.parametrize("count", [1.5, "3", None, True])
def test_a_batch_is_a_whole_number(pool: Pool, count: Any) -> None:
    with pytest.raises(CapacityError, match=f"whole number of episodes, got {count!r}"):
        pool.reserve(count)


def test_a_batch_that_could_never_fit_is_refused_without_waiting(pool: Pool, redis_url: str) -> None:
    with opened_farm(redis_url, concurrency_limit=4) as farm:
        beat_slots(farm, 2)
    began = time.monotonic()
    with pytest.raises(NeverFits, match="add 1 worker"):
        pool.reserve(4, wait_seconds=30)
    with pytest.raises(NeverFits, match="FARM_CONCURRENCY_LIMIT to 5"):
        pool.reserve(5, wait_seconds=30)
    assert time.monotonic() - began < 2


def test_a_batch_that_does_not_fit_now_is_waited_for_and_then_refused(pool: Pool, redis_url: str) -> None:
    with opened_farm(redis_url, concurrency_limit=4) as farm:
        beat_slots(farm, 4)
        held = pool.reserve(3)
        with pytest.raises(PlacesTaken, match="1 free now"):
            pool.reserve(2, wait_seconds=0.15)
        threading.Timer(0.1, held.release).start()
        with pool.reserve(2, wait_seconds=10):
            assert pool.capacity().reserved == 2
