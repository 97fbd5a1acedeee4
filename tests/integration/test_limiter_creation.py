"""The limiter's creations on a real Redis: spaced over all who create, paused together after a 429."""

from __future__ import annotations

import threading
import time

import pytest
from redis import Redis

from orchestrator.errors import ConcurrencyLimited, EpisodeAborted, LeaseLost, RateLimited
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome
from tests.support.line import PROMPT_SECONDS
from tests.support.truth import farm_settings, opened_farm
from tests.support.waiting import wait_until


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=2)


def create_together(farm: Farm, threads: int, each: int, *, wait_seconds: float = 20) -> list[float]:
    """When each of so many creations may be sent, over connections of their own."""
    times: list[float] = []

    def create() -> None:
        for _ in range(each):
            farm.limiter.wait_to_create(wait_seconds=wait_seconds, check=lambda: None)
            times.append(time.monotonic())

    workers = [threading.Thread(target=create) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    return sorted(times)


def test_creations_are_spaced_over_all_who_create(redis_url: str) -> None:
    with opened_farm(redis_url, creation_rate=50) as farm, opened_farm(redis_url, creation_rate=50) as other:
        both: list[list[float]] = [[], []]

        def run(index: int, part: Farm) -> None:
            both[index] = create_together(part, threads=2, each=5)

        runs = [threading.Thread(target=run, args=(n, part)) for n, part in enumerate((farm, other))]
        since = time.monotonic()
        for thread in runs:
            thread.start()
        for thread in runs:
            thread.join(20)
        times = sorted(both[0] + both[1])
        assert len(times) == 20
        assert all(at - since >= number * 0.020 - 0.010 for number, at in enumerate(times)), times
        assert times[-1] - since < 5


def test_without_a_rate_nobody_waits(farm: Farm) -> None:
    times = create_together(farm, threads=2, each=10)
    assert times[-1] - times[0] < PROMPT_SECONDS


def test_a_rate_429_pauses_everybody(farm: Farm, redis_url: str) -> None:
    since = time.monotonic()
    assert farm.limiter.report(RateLimited("slow down", 0.6)) == pytest.approx(0.6, abs=0.01)
    left = farm.limiter.report(RateLimited("slow down", 0.1))
    assert left > 0.58 - (time.monotonic() - since), "a shorter pause does not shorten it"
    with opened_farm(redis_url) as other:
        [at] = create_together(other, threads=1, each=1)
    assert 0.59 <= at - since < 5


def test_a_rate_429_without_a_header_pauses_all_the_same(farm: Farm) -> None:
    assert farm.limiter.report(RateLimited("slow down")) > 0.5


def test_creations_stay_spaced_after_a_pause(redis_url: str) -> None:
    """Those whose places fell into the pause do not all come at its end."""
    with opened_farm(redis_url, creation_rate=20) as farm:
        times: list[float] = []
        runner = threading.Thread(target=lambda: times.extend(create_together(farm, threads=10, each=1)))
        runner.start()
        wait_until(lambda: farm.redis.hexists(Keys.LIMITS, "next_creation"), description="a place is booked")
        paused = time.monotonic()
        farm.limiter.report(RateLimited("slow down", 0.6))
        runner.join(20)
        late = [at - paused for at in times if at - paused > 0.58]
        assert len(late) >= 3
        assert all(at >= 0.6 + number * 0.05 - 0.02 for number, at in enumerate(late)), late


def test_a_place_beyond_the_wait_is_refused_at_once(redis_url: str) -> None:
    with opened_farm(redis_url, creation_rate=0.1) as farm:
        farm.limiter.wait_to_create(wait_seconds=1, check=lambda: None)
        since = time.monotonic()
        with pytest.raises(EpisodeAborted) as refused:
            farm.limiter.wait_to_create(wait_seconds=1, check=lambda: None)
        assert refused.value.outcome is Outcome.DEADLINE
        assert time.monotonic() - since < PROMPT_SECONDS


def test_a_place_that_was_refused_is_not_booked(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, creation_rate=0.1) as farm:
        farm.limiter.wait_to_create(wait_seconds=1, check=lambda: None)
        booked = redis.hget(Keys.LIMITS, "next_creation")
        for _ in range(3):
            with pytest.raises(EpisodeAborted):
                farm.limiter.wait_to_create(wait_seconds=1, check=lambda: None)
        assert redis.hget(Keys.LIMITS, "next_creation") == booked


def test_a_wait_for_a_creation_can_be_given_up(farm: Farm) -> None:
    farm.limiter.report(RateLimited("slow down", 10))
    looks = iter([None, LeaseLost("lost")])

    def check() -> None:
        if error := next(looks):
            raise error

    with pytest.raises(LeaseLost):
        farm.limiter.wait_to_create(wait_seconds=20, check=check)


def test_a_concurrency_429_is_counted_apart_and_pauses_nobody_else(farm: Farm, redis: Redis) -> None:
    assert farm.limiter.report(ConcurrencyLimited("too many running")) > 0
    farm.limiter.report(RateLimited("slow down", 0.0))
    farm.limiter.report(ConcurrencyLimited("too many running"))
    assert redis.hgetall(Keys.COUNTERS) == {"rate_limited:concurrency": "2", "rate_limited:rate": "1"}
    times = create_together(farm, threads=1, each=1)
    assert len(times) == 1
    since = time.monotonic()
    create_together(farm, threads=1, each=1)
    assert time.monotonic() - since < PROMPT_SECONDS
