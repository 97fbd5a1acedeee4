"""The line of those who create, on a real Redis: spaced over all, verifiers first, nobody forgotten or polling."""

from __future__ import annotations

import threading
import time

import pytest
from redis import Redis

from orchestrator.errors import EpisodeAborted, LeaseLost, RateLimited
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import Admission
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import admit, farm_settings, leased, opened_farm
from tests.support.creators import Creator, create, creation_of
from tests.support.line import PROMPT_SECONDS, end


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=100)


def create_together(farm: Farm, name: str, threads: int, each: int) -> list[float]:
    """When each of so many creations may be sent, over connections of their own."""
    times: list[float] = []

    def run(number: int) -> None:
        for _ in range(each):
            create(farm, f"e-{name}-{number}")
            times.append(time.monotonic())

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    return sorted(times)


def test_creations_are_spaced_over_all_who_create(redis_url: str) -> None:
    with opened_farm(redis_url, creation_rate=50) as farm, opened_farm(redis_url, creation_rate=50) as other:
        both: list[list[float]] = [[], []]

        def run(index: int, part: Farm) -> None:
            both[index] = create_together(part, f"p{index}", threads=2, each=5)

        runs = [threading.Thread(target=run, args=(n, part)) for n, part in enumerate((farm, other))]
        since = time.monotonic()
        for thread in runs:
            thread.start()
        for thread in runs:
            thread.join(20)
        times = sorted(both[0] + both[1])
        assert len(times) == 20
        assert all(at - since >= number * 0.020 - 0.011 for number, at in enumerate(times)), times
        assert times[-1] - since < 5


def test_without_a_rate_nobody_waits(farm: Farm) -> None:
    times = create_together(farm, "free", threads=2, each=10)
    assert times[-1] - times[0] < PROMPT_SECONDS


def test_an_uncontended_creation_takes_one_call_to_redis(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, creation_rate=5) as farm:
        create(farm, "e-first")
        farm.limiter.change(rate=6)  # forgets when the next one is due
        redis.config_resetstat()
        create(farm, "e-second")
        calls = redis.info("commandstats")
        assert calls["cmdstat_evalsha"]["calls"] == 1
        assert not {"cmdstat_blpop", "cmdstat_eval"} & calls.keys()


def test_verifiers_go_before_policies_and_each_class_in_order(redis_url: str) -> None:
    with opened_farm(redis_url, creation_rate=4, concurrency_limit=100) as farm:
        for name in ("v1", "v2"):  # their policy sandboxes
            create(farm, f"e-{name}")
        policies = [Creator(farm, f"e-p{n}").in_line() for n in range(3)]
        verifiers = [Creator(farm, f"e-v{n}", Role.VERIFIER).in_line() for n in (1, 2)]
        times = [waiter.granted() for waiter in (*verifiers, *policies)]
        assert times == sorted(times)


def test_a_verifier_that_comes_last_overtakes_a_long_line(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, creation_rate=0.02, concurrency_limit=1000) as farm:
        create(farm, "e-early")
        others = [creation_of(farm, f"e-{n}", Role.POLICY) for n in range(300)]
        for waiting in others:
            assert waiting.ask(100_000).state == "wait"
        assert others[-1].ask(100_000).wait_seconds == 2.0, "a far turn is not slept through without a look"
        assert creation_of(farm, "e-late", Role.POLICY).ask(1000).state == "too_far"
        assert creation_of(farm, "e-early", Role.VERIFIER).ask(60).state == "wait", "the next creation is its own"
        for waiting in others:
            waiting.leave()


def test_policies_are_not_starved_by_verifiers(redis_url: str) -> None:
    """A closed loop of four permits: each episode's verifier goes first, and follows its own policy sandbox."""
    with opened_farm(redis_url, creation_rate=100, concurrency_limit=4) as farm:
        policies: list[str] = []

        def run(name: str) -> None:
            for number in range(6):
                spec, lease = leased(farm)
                assert admit(farm, spec.episode_id) is Admission.GRANTED
                create(farm, spec.episode_id)
                policies.append(f"{name}-{number}")
                create(farm, spec.episode_id, Role.VERIFIER)
                end(farm, (spec, lease))

        threads = [threading.Thread(target=run, args=(f"t{n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(policies) == 48
        reading = farm.limiter.read()
        assert (reading.held, reading.sandboxes, reading.creations) == (0, 0, 96)


def test_a_waiter_whose_process_died_is_passed_over(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, creation_rate=20, concurrency_limit=100) as farm:
        create(farm, "e-now")
        dead = [creation_of(farm, f"e-dead-{n}", Role.POLICY) for n in range(3)]
        for waiting in dead:
            assert waiting.ask(10).state == "wait"  # and never comes back
        since = time.monotonic()
        heir = Creator(farm, "e-heir")
        assert heir.granted() - since < PROMPT_SECONDS
        for waiting in dead:
            assert redis.zscore(Keys.CREATORS, waiting.creation_id) is not None, "it may only be slow"
            redis.zadd(Keys.CREATORS_DUE, {waiting.creation_id: 1})
        create(farm, "e-next")
        assert Creator(farm, "e-later").granted()
        assert redis.zcard(Keys.CREATORS) == redis.zcard(Keys.CREATORS_DUE) == 0


def test_one_that_gives_up_wakes_the_next(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, creation_rate=0.5, concurrency_limit=100) as farm:
        create(farm, "e-now")
        gone = creation_of(farm, "e-gone", Role.POLICY)
        assert gone.ask(10).state == "wait"
        heir = creation_of(farm, "e-heir", Role.POLICY)
        assert heir.ask(10).state == "wait"
        redis.zadd(Keys.CREATORS_DUE, {heir.creation_id: farm.ledger.now() * 1000 + 9000})
        gone.leave()
        assert redis.llen(Keys.wake(heir.creation_id)) == 1
        heir.leave()


def test_a_lost_answer_asked_again_takes_no_second_place(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, creation_rate=0.1) as farm:
        creation = creation_of(farm, "e-1", Role.POLICY)
        assert creation.ask(1).state == "granted"
        booked = redis.hget(Keys.LIMITS, "next_creation")
        assert creation.ask(1).state == "granted"
        assert redis.hget(Keys.LIMITS, "next_creation") == booked
        assert farm.limiter.read().creations == 1


def test_a_turn_beyond_the_wait_is_refused_at_once_and_books_nothing(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, creation_rate=0.1) as farm:
        create(farm, "e-1")
        booked = redis.hget(Keys.LIMITS, "next_creation")
        since = time.monotonic()
        for number in range(3):
            with pytest.raises(EpisodeAborted) as refused:
                create(farm, f"e-late-{number}", wait_seconds=1)
            assert refused.value.outcome is Outcome.DEADLINE
        assert time.monotonic() - since < PROMPT_SECONDS
        assert redis.hget(Keys.LIMITS, "next_creation") == booked
        assert redis.zcard(Keys.CREATORS) == 0


def test_a_wait_for_a_creation_can_be_given_up(farm: Farm, redis: Redis) -> None:
    farm.limiter.note(RateLimited("slow down", 10))

    def check() -> None:
        raise LeaseLost("lost")

    waiter = Creator(farm, "e-1", check=check)
    waiter.join(10)
    assert isinstance(waiter.error, LeaseLost)
    assert redis.zcard(Keys.CREATORS) == redis.zcard(Keys.CREATORS_DUE) == 0


def test_an_episode_that_has_its_receipt_creates_nothing(farm: Farm, redis: Redis) -> None:
    episode = leased(farm)
    end(farm, episode)
    with pytest.raises(LeaseLost):
        create(farm, episode[0].episode_id)
    assert redis.zcard(Keys.PLACES) == 0


def test_a_raised_rate_wakes_who_waits(redis_url: str) -> None:
    with opened_farm(redis_url, creation_rate=0.05, concurrency_limit=100) as farm:
        create(farm, "e-now")
        waiters = [Creator(farm, f"e-{n}", wait_seconds=300).in_line() for n in range(5)]
        since = time.monotonic()
        farm.limiter.change(rate=100)
        assert max(waiter.granted() for waiter in waiters) - since < PROMPT_SECONDS
        assert farm.limiter.read().rate_effective == 100
