"""The limiter's line on a real Redis: never above the limit, first come first served, woken at once."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from typing import cast

import pytest
from redis import Redis

from orchestrator.errors import EpisodeAborted, LeaseLost
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import Admission, Limiter, PermitAnswer
from orchestrator.records import EpisodeSpec
from orchestrator.rows import Lease
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import a_receipt, a_spec, admit, farm_settings, leased, opened_farm
from tests.support.creators import Creator, create
from tests.support.line import PROMPT_SECONDS, Waiter, end, queue_up, running
from tests.support.waiting import wait_until

CONTENDER = """
import sys, threading
from tests.support.bare_farm import a_receipt, a_spec, admit, leased, opened_farm

def contend(url, name, rounds, limit, highest):
    with opened_farm(url, concurrency_limit=limit) as farm:
        for number in range(rounds):
            spec, lease = leased(farm, a_spec(f"e-{name}-{number}"))
            admit(farm, spec.episode_id)
            highest.append(farm.redis.incr("test:held"))
            farm.redis.expire("test:held", 60)
            highest.append(farm.redis.zcard("farm:permits"))
            farm.redis.decr("test:held")
            farm.ledger.commit(a_receipt(spec), lease.token)

url, name, rounds, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
highest = []
threads = [threading.Thread(target=contend, args=(url, f"{name}-{n}", rounds, limit, highest)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(highest), max(highest))
"""


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=2)


def test_never_above_the_limit_under_eight_contenders_in_two_processes(redis_url: str, redis: Redis) -> None:
    rounds, limit = 12, 3
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, redis_url, f"p{n}", str(rounds), str(limit)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        count, highest = map(int, output.split())
        assert count == 4 * rounds * 2
        assert highest <= limit
    assert redis.zcard(Keys.PERMITS) == redis.zcard(Keys.WAITERS) == redis.zcard(Keys.WAITERS_SEEN) == 0
    assert redis.zcard(Keys.RECEIPTS) == 8 * rounds


def test_an_episode_has_at_most_one_permit(farm: Farm, redis: Redis) -> None:
    episode = running(farm)
    assert admit(farm, episode[0].episode_id) is Admission.GRANTED
    assert redis.zcard(Keys.PERMITS) == 1
    end(farm, episode)


def test_first_come_first_served(farm: Farm) -> None:
    held = [running(farm), running(farm)]
    waiters = queue_up(farm, 4)
    end(farm, held[0])
    for number, waiter in enumerate(waiters):
        waiter.join(10)
        assert [w.granted for w in waiters[number + 1 :]] == [None] * (3 - number)
        waiter.end()
    end(farm, held[1])


def test_a_waiter_is_woken_by_the_release_and_not_by_a_clock(farm: Farm) -> None:
    held = [running(farm), running(farm)]
    [waiter] = queue_up(farm, 1)
    since = time.monotonic()
    end(farm, held[0])
    waiter.expect_prompt(since)
    waiter.end()
    end(farm, held[1])


def test_two_releases_at_once_wake_two_waiters(farm: Farm) -> None:
    held = [running(farm), running(farm)]
    waiters = queue_up(farm, 2)
    for spec, _ in held:  # as both releases would do it before the first waiter has asked
        farm.redis.zrem(Keys.PERMITS, spec.episode_id)
    since = time.monotonic()
    farm.redis.lpush(Keys.wake(waiters[0].episode_id), "1", "1")
    for waiter in waiters:
        waiter.expect_prompt(since)  # before any of them ends, which would wake the next
    for waiter in waiters:
        waiter.end()
    end(farm, *held)


def test_a_waiter_that_gives_up_after_its_wake_passes_it_on(farm: Farm) -> None:
    gave_up = threading.Event()

    def check() -> None:
        if gave_up.is_set():
            raise EpisodeAborted(Outcome.CANCELLED, "given up")

    held = [running(farm), running(farm)]
    leaver = Waiter(farm, check=check)
    leaver.wait_in_line()
    [heir] = queue_up(farm, 1)
    gave_up.set()
    since = time.monotonic()
    end(farm, held[0])  # wakes the leaver, which gives up instead of asking
    leaver.join(10)
    assert isinstance(leaver.granted, EpisodeAborted)
    heir.expect_prompt(since)
    heir.end()
    leaver.end()
    end(farm, held[1])


def test_no_wake_is_lost_however_many_give_up(redis_url: str, redis: Redis) -> None:
    """A lost wake would show as a wait of BLOCK_SECONDS = 5."""
    served: list[float] = []
    gave_up: list[str] = []

    def contend(seed: int) -> None:
        dice = random.Random(seed)
        with opened_farm(redis_url, concurrency_limit=2) as farm:
            for _ in range(15):
                spec, lease = leased(farm)
                began = time.monotonic()
                try:
                    admit(farm, spec.episode_id, wait_seconds=dice.choice([20, 20, 0.001, 0.02]))
                    served.append(time.monotonic() - began)
                    time.sleep(0.005)  # else there may be nobody who has to wait
                except EpisodeAborted:
                    gave_up.append(spec.episode_id)
                farm.ledger.commit(a_receipt(spec), lease.token)

    threads = [threading.Thread(target=contend, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(served) + len(gave_up) == 8 * 15
    assert gave_up
    assert max(served) < 4.5
    assert redis.zcard(Keys.PERMITS) == redis.zcard(Keys.WAITERS) == redis.zcard(Keys.WAITERS_SEEN) == 0


def test_the_wake_of_a_waiter_that_died_is_passed_on_with_its_receipt(farm: Farm, redis: Redis) -> None:
    held = [running(farm), running(farm)]
    dead = leased(farm)
    seconds, micros = redis.time()
    now = seconds * 1000 + micros // 1000
    redis.zadd(Keys.WAITERS, {dead[0].episode_id: now - 1000})
    redis.zadd(Keys.WAITERS_SEEN, {dead[0].episode_id: now})
    [heir] = queue_up(farm, 1)
    end(farm, held[0])  # wakes the dead one
    assert redis.llen(Keys.wake(dead[0].episode_id)) == 1
    since = time.monotonic()
    end(farm, dead)  # as the reconciler does when its lease has run out
    heir.expect_prompt(since)
    heir.end()
    end(farm, held[1])


def test_waiters_that_no_longer_ask_are_taken_out_of_the_line(farm: Farm, redis: Redis) -> None:
    redis.zadd(Keys.WAITERS, {"e-dead-1": 1, "e-dead-2": 2})
    redis.zadd(Keys.WAITERS_SEEN, {"e-dead-1": 1, "e-dead-2": 2})
    since = time.monotonic()
    held = [running(farm), running(farm)]
    assert time.monotonic() - since < PROMPT_SECONDS
    assert redis.zcard(Keys.WAITERS) == redis.zcard(Keys.WAITERS_SEEN) == 0
    end(farm, *held)


@pytest.mark.parametrize("step_ms", [0, -60_000], ids=["in-one-millisecond", "while-the-clock-steps-back"])
def test_first_come_first_served_is_by_who_asked_first_not_by_a_clock(farm: Farm, redis: Redis, step_ms: int) -> None:
    clock = {"now": 1_700_000_000_000}
    limiter = Limiter(farm.redis, concurrency_limit=1, creation_rate=0, clock_ms=lambda: clock["now"])
    holder, *waiting = (leased(farm, a_spec(f"e-{9 - n}")) for n in range(6))
    answers = []
    for spec, _ in (holder, *waiting):
        answers.append(limiter.ask(spec.episode_id, reservation_id=None))
        clock["now"] += step_ms
    assert answers == [PermitAnswer.GRANTED, *[PermitAnswer.WAIT] * 5]
    assert redis.zrange(Keys.WAITERS, 0, -1) == [spec.episode_id for spec, _ in waiting]
    end(farm, holder, *waiting)


def test_a_waiter_that_waited_long_enough_ends_with_admission_timeout(farm: Farm, redis: Redis) -> None:
    held = [running(farm), running(farm)]
    late = leased(farm)
    since = time.monotonic()
    with pytest.raises(EpisodeAborted) as refused:
        admit(farm, late[0].episode_id, wait_seconds=0.2)
    assert refused.value.outcome is Outcome.ADMISSION_TIMEOUT
    assert 0.15 < time.monotonic() - since < 0.2 + PROMPT_SECONDS
    assert redis.zcard(Keys.WAITERS) == redis.zcard(Keys.WAITERS_SEEN) == 0
    end(farm, late, *held)


def test_an_episode_that_has_its_receipt_gets_no_permit(farm: Farm, redis: Redis) -> None:
    """A slot that was stopped for long still asks; a permit given now would be freed by nobody."""
    episode = leased(farm)
    end(farm, episode)
    with pytest.raises(LeaseLost):
        admit(farm, episode[0].episode_id)
    assert redis.zcard(Keys.PERMITS) == redis.zcard(Keys.WAITERS) == 0


def test_a_limit_raised_while_the_farm_runs_counts(farm: Farm, redis: Redis) -> None:
    held = [running(farm), running(farm)]
    redis.hset(Keys.LIMITS, "concurrency", 3)
    held.append(running(farm))
    end(farm, *held)


def test_many_waiters_ask_seldom_and_none_polls_hot(redis_url: str, redis: Redis) -> None:
    """The server's own count: each waiter asks when it comes, when it is woken, and every BLOCK_SECONDS = 5."""
    with opened_farm(redis_url, concurrency_limit=2) as farm:
        held = [running(farm), running(farm)]
        waiters = queue_up(farm, 30)
        before, since = _commands(redis), time.monotonic()
        wait_until(lambda: time.monotonic() - since > 6, description="six seconds of waiting", seconds=20)
        waited = time.monotonic() - since
        asked = _commands(redis) - before
        assert asked >= 30, "each has asked again by itself once at least"
        assert asked <= 30 * 2 * (waited / 5 + 1), "a question and a blocking pop in five seconds"
        before = _commands(redis)
        end(farm, *held)
        for waiter in waiters:
            waiter.join(20)
            assert waiter.granted is Admission.GRANTED
            waiter.end()
        assert _commands(redis) - before <= 30 * 10, "one release wakes one, not all"


def test_many_creators_ask_seldom_and_none_polls_hot(redis_url: str, redis: Redis) -> None:
    """One creation in ten seconds, so that nobody's turn comes: a look every two seconds is all."""
    with opened_farm(redis_url, concurrency_limit=100, creation_rate=0.1) as farm:
        create(farm, "e-first")
        left = threading.Event()

        def check() -> None:
            if left.is_set():
                raise EpisodeAborted(Outcome.CANCELLED, "given up")

        creators = [Creator(farm, f"e-{n}", wait_seconds=1000, check=check).in_line() for n in range(30)]
        before, since = _commands(redis), time.monotonic()
        wait_until(lambda: time.monotonic() - since > 5, description="five seconds of waiting", seconds=20)
        waited = time.monotonic() - since
        asked = _commands(redis) - before
        left.set()
        for creator in creators:
            creator.join(20)
            assert isinstance(creator.error, EpisodeAborted)
        assert 30 <= asked <= 30 * 2 * (waited / 2 + 1), "a question and a blocking pop in two seconds"


def _commands(redis: Redis) -> int:
    """Questions and blocking pops that the server has been sent so far; not what scripts call."""
    calls = cast("dict[str, dict[str, int]]", redis.info("commandstats"))
    return sum(calls.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval", "blpop"))


def test_who_waited_while_redis_lost_its_data_gets_no_permit(farm: Farm, redis: Redis) -> None:
    """It has no row any more, so that nobody would ever free what it got."""
    spec, _ = leased(farm)
    redis.delete(Keys.episode(spec.episode_id))
    assert farm.limiter.ask(spec.episode_id, reservation_id=None) is PermitAnswer.OVER
    with pytest.raises(LeaseLost, match="the farm lost it"):
        farm.limiter.creation(spec.episode_id, Role.POLICY).wait(wait_seconds=1, check=lambda: None)
    assert redis.exists(Keys.PERMITS, Keys.PLACES, Keys.CREATORS) == 0
    redis.delete(Keys.OPEN, Keys.LEASES)


def test_a_newcomer_does_not_overtake_the_waiter_that_was_woken(redis_url: str) -> None:
    with opened_farm(redis_url, concurrency_limit=1) as farm:
        holder, first, newcomer = (leased(farm) for _ in range(3))

        def ask(one: tuple[EpisodeSpec, Lease]) -> PermitAnswer:
            return farm.limiter.ask(one[0].episode_id, reservation_id=None)

        assert ask(holder) is PermitAnswer.GRANTED
        assert ask(first) is PermitAnswer.WAIT
        end(farm, holder)  # wakes the first, who has not asked yet
        assert ask(newcomer) is PermitAnswer.WAIT
        assert ask(first) is PermitAnswer.GRANTED
        end(farm, first)
        assert ask(newcomer) is PermitAnswer.GRANTED
        end(farm, newcomer)
