"""The limiter's reservations on a real Redis: batches are whole or not at all, and take their turn."""

from __future__ import annotations

import threading
import time

import pytest
from redis import Redis

from orchestrator.creations import Creation
from orchestrator.errors import CapacityError, ConcurrencyLimited, EpisodeAborted
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import Admission
from orchestrator.records import EpisodeSpec
from orchestrator.rows import Lease
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import admit, beat_slots, farm_settings, leased, opened_farm
from tests.support.clocked import Clocked
from tests.support.creators import Creator, create
from tests.support.line import PROMPT_SECONDS, end, queue_up, running
from tests.support.waiting import wait_until


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=2)


def test_capacity_is_the_lesser_of_slots_and_limit_minus_admitted_and_reserved(farm: Farm) -> None:
    assert farm.limiter.capacity().free == 0
    beat_slots(farm, 8)
    assert (farm.limiter.capacity().live_slots, farm.limiter.capacity().free) == (8, 2)
    episode = running(farm)
    assert farm.limiter.capacity().free == 1
    assert farm.limiter.reserve("r1", 1, life_seconds=30)
    assert (farm.limiter.capacity().reserved, farm.limiter.capacity().free) == (1, 0)
    end(farm, episode)
    farm.limiter.release_reservation("r1")
    assert farm.limiter.capacity().free == 2


def test_a_reservation_is_all_or_nothing(farm: Farm) -> None:
    beat_slots(farm, 2)
    episode = running(farm)
    assert not farm.limiter.reserve("r1", 2, life_seconds=30)
    assert farm.limiter.capacity().reserved == 0
    end(farm, episode)
    assert farm.limiter.reserve("r1", 2, life_seconds=30)


def test_reserving_again_under_the_same_id_is_the_same_reservation(farm: Farm) -> None:
    beat_slots(farm, 2)
    assert farm.limiter.reserve("r1", 2, life_seconds=30)
    assert farm.limiter.reserve("r1", 2, life_seconds=30)
    assert farm.limiter.capacity().reserved == 2


def test_of_many_reservers_at_once_none_gets_a_part(redis_url: str) -> None:
    with opened_farm(redis_url, concurrency_limit=3) as farm:
        beat_slots(farm, 3)
        for number in range(20):
            barrier = threading.Barrier(4)
            got: list[str] = []

            def reserve(name: str, barrier: threading.Barrier = barrier, got: list[str] = got) -> None:
                barrier.wait(5)
                if farm.limiter.reserve(name, 2, life_seconds=30):
                    got.append(name)

            threads = [threading.Thread(target=reserve, args=(f"r{number}-{n}",)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(5)
            assert len(got) == 1
            assert farm.limiter.capacity().reserved == 2
            farm.limiter.release_reservation(got[0])


def test_a_batch_that_can_never_fit_says_how_many_workers_to_add(redis_url: str) -> None:
    with opened_farm(redis_url, concurrency_limit=100) as farm:
        beat_slots(farm, 3)
        with pytest.raises(CapacityError, match=r"3 slots are live: add 3 workers") as refused:
            farm.limiter.reserve("r1", 8, life_seconds=30)
        assert "limit" not in str(refused.value)


def test_a_batch_that_can_never_fit_says_how_much_limit_to_add(farm: Farm) -> None:
    beat_slots(farm, 8)
    with pytest.raises(CapacityError, match=r"raise FARM_CONCURRENCY_LIMIT to 4") as refused:
        farm.limiter.reserve("r1", 4, life_seconds=30)
    assert "add" not in str(refused.value)


def test_what_is_reserved_is_granted_to_the_batch_and_to_nobody_else(farm: Farm, redis: Redis) -> None:
    beat_slots(farm, 2)
    assert farm.limiter.reserve("r1", 2, life_seconds=30)
    stranger = leased(farm)
    assert admit(farm, stranger[0].episode_id) is Admission.STEP_BACK
    assert redis.zcard(Keys.WAITERS) == 0
    batch = [leased(farm), leased(farm)]
    for spec, _ in batch:
        assert admit(farm, spec.episode_id, reservation_id="r1") is Admission.GRANTED
    assert farm.limiter.capacity().reserved == 0
    end(farm, stranger, *batch)


def test_reserved_episodes_are_granted_before_those_that_came_first(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, concurrency_limit=3) as farm:
        beat_slots(farm, 4)
        held = [running(farm)]
        assert farm.limiter.reserve("r1", 2, life_seconds=30)
        [early] = queue_up(farm, 1)
        for _ in range(2):
            spec, lease = leased(farm)
            assert admit(farm, spec.episode_id, reservation_id="r1") is Admission.GRANTED
            held.append((spec, lease))
        assert redis.zscore(Keys.PERMITS, early.episode_id) is None
        end(farm, *held)
        early.end()


def test_an_unreserved_episode_that_waits_leaves_its_slot_to_a_batch(farm: Farm, redis: Redis) -> None:
    beat_slots(farm, 2)
    held = [running(farm), running(farm)]
    waiters = queue_up(farm, 2)
    assert not farm.limiter.ask_places("r1", 2, life_seconds=30, stays=True)
    redis.zadd(Keys.BATCHES, {"2:r1": 1})  # it came before them
    redis.zrem(Keys.PERMITS, *(spec.episode_id for spec, _ in held))
    since = time.monotonic()
    assert farm.limiter.ask_places("r1", 2, life_seconds=30, stays=True)
    for waiter in waiters:
        waiter.join(10)
        assert waiter.granted is Admission.STEP_BACK
    assert time.monotonic() - since < PROMPT_SECONDS, "each leaves when it is told, not when it asks by itself"
    end(farm, *held)
    for waiter in waiters:
        waiter.end()


def test_what_is_left_of_a_reservation_can_be_given_back(farm: Farm) -> None:
    beat_slots(farm, 2)
    assert farm.limiter.reserve("r1", 2, life_seconds=30)
    first = leased(farm)
    admit(farm, first[0].episode_id, reservation_id="r1")
    assert farm.limiter.capacity().reserved == 1
    farm.limiter.release_reservation("r1")
    assert farm.limiter.capacity().free == 1
    second = running(farm)
    end(farm, first, second)


def test_expired_reservations_are_dropped(farm: Farm, redis: Redis) -> None:
    beat_slots(farm, 2)
    assert farm.limiter.reserve("r1", 2, life_seconds=0.02)
    wait_until(lambda: farm.limiter.capacity().reserved == 0, description="the reservation has expired")
    assert farm.limiter.reserve("r2", 2, life_seconds=0.02)
    assert redis.hkeys(Keys.RESERVATIONS) == ["r2"]
    wait_until(lambda: farm.limiter.capacity().reserved == 0, description="the reservation has expired")
    episode = running(farm)
    assert redis.hlen(Keys.RESERVATIONS) == 0
    end(farm, episode)


def test_a_limit_below_the_reservation_ends_the_batch_at_once(farm: Farm, redis: Redis) -> None:
    beat_slots(farm, 2)
    assert farm.limiter.reserve("r1", 2, life_seconds=30)
    redis.hset(Keys.LIMITS, "concurrency", 1)
    for _ in range(2):
        spec, lease = leased(farm)
        since = time.monotonic()
        with pytest.raises(EpisodeAborted) as refused:
            admit(farm, spec.episode_id, reservation_id="r1")
        assert refused.value.outcome is Outcome.ADMISSION_TIMEOUT
        assert time.monotonic() - since < PROMPT_SECONDS
        end(farm, (spec, lease))
    assert redis.zcard(Keys.PERMITS) == redis.zcard(Keys.WAITERS) == 0


def test_a_batch_gets_its_places_although_a_429_once_lowered_the_limit(redis: Redis) -> None:
    """A trainer that only reserves: nobody ever comes to a creation that could try one more."""
    farm = Clocked(redis, concurrency_limit=20)
    redis.zadd(Keys.SLOTS, {f"slot-{number}": farm.now + 10**9 for number in range(20)})
    *_, refused = farm.let_through(3)
    farm.refuse_concurrency(refused)
    redis.delete(Keys.PLACES)  # as their receipts do
    assert farm.limit == 2
    waited = 0
    while not farm.limiter.ask_places("r1", 8, life_seconds=120, stays=True):
        farm.pass_seconds(0.1)
        waited += 1
        assert waited < 100
    assert waited > 40, "not before the lowered limit has stood for a while"
    assert farm.limit == 8
    assert not farm.limiter.reserve("r2", 8, life_seconds=120), "the next try waits as long again"


def test_a_batch_whose_last_creation_is_refused_ends_at_once(redis_url: str) -> None:
    """The three that are ready wait for the fourth: nothing of theirs will make room, and their windows run."""
    with opened_farm(redis_url, concurrency_limit=8) as farm:
        beat_slots(farm, 8)
        *ready, last = batch = _created(farm, "r1", 4)
        assert last[1].refused(ConcurrencyLimited("3 are running")) == 0
        since = time.monotonic()
        with pytest.raises(EpisodeAborted) as ended:
            last[1].wait(wait_seconds=60, check=lambda: None)
        assert time.monotonic() - since < PROMPT_SECONDS
        assert ended.value.outcome is Outcome.ADMISSION_TIMEOUT
        for (spec, _), _creation in ready:
            create(farm, spec.episode_id, Role.VERIFIER, wait_seconds=10)  # those that are ready go on
        end(farm, *(episode for episode, _ in batch))


def test_two_batches_that_got_a_part_each_do_not_wait_for_each_other(redis_url: str) -> None:
    with opened_farm(redis_url, concurrency_limit=8) as farm:
        beat_slots(farm, 8)
        first, second = _created(farm, "r1", 4), _created(farm, "r2", 4)
        for _, creation in (first[-1], second[-1]):
            creation.refused(ConcurrencyLimited("6 are running"))
        assert farm.limiter.read().concurrency_effective == 6
        with pytest.raises(EpisodeAborted) as ended:
            first[-1][1].wait(wait_seconds=60, check=lambda: None)
        assert ended.value.outcome is Outcome.ADMISSION_TIMEOUT
        end(farm, *(episode for episode, _ in (*first, *second)))


def test_a_batch_that_still_fits_waits_for_the_end_of_another_episode(redis_url: str) -> None:
    with opened_farm(redis_url, concurrency_limit=8) as farm:
        beat_slots(farm, 8)
        others = [running(farm), running(farm)]
        for spec, _ in others:
            create(farm, spec.episode_id)
        batch = _created(farm, "r1", 4)
        (spec, _), creation = batch[-1]
        creation.refused(ConcurrencyLimited("5 are running"))
        waiting = Creator(farm, spec.episode_id, creation=creation).in_line()
        end(farm, others[0])
        waiting.granted()
        end(farm, others[1], *(episode for episode, _ in batch))


def _created(farm: Farm, reservation_id: str, count: int) -> list[tuple[tuple[EpisodeSpec, Lease], Creation]]:
    """A batch, reserved and admitted, each with leave to create."""
    assert farm.limiter.reserve(reservation_id, count, life_seconds=30)
    batch = [leased(farm) for _ in range(count)]
    for spec, _ in batch:
        assert admit(farm, spec.episode_id, reservation_id=reservation_id) is Admission.GRANTED
    return [(episode, create(farm, episode[0].episode_id)) for episode in batch]
