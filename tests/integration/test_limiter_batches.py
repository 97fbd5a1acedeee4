"""Batches and episodes without a reservation in the limiter's one line: first come, first served, nobody starves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from redis import Redis

from orchestrator.errors import EpisodeAborted, PlacesTaken
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import PermitAnswer
from orchestrator.pool import Pool
from orchestrator.records import Script
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import (
    TASK,
    TinySlot,
    admit,
    beat_slots,
    farm_settings,
    leased,
    run_episode,
)
from tests.support.clocked import Clocked
from tests.support.line import PROMPT_SECONDS, end, queue_up, running
from tests.support.waiting import wait_until

SCRIPT = Script(commands=("true",))


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=2)


class Line:
    """A farm of `places` slots and permits whose clock the test moves, and who asks for them by name."""

    def __init__(self, redis: Redis, places: int) -> None:
        self.redis, self.clock = redis, Clocked(redis, concurrency_limit=places)
        redis.zadd(Keys.SLOTS, {f"slot-{number}": self.clock.now + 10**9 for number in range(places)})

    def episode(self, name: str, *, batch: str | None = None) -> PermitAnswer:
        run_episode(self.redis, name)
        return self.clock.limiter.ask(name, reservation_id=batch)

    def batch(self, name: str, count: int) -> bool:
        return self.clock.limiter.ask_places(name, count, life_seconds=120, stays=True)

    def begin(self, batch: str, count: int) -> None:
        """The episodes of a reserved batch have their permits."""
        for number in range(count):
            assert self.episode(f"e-{batch}-{number}", batch=batch) is PermitAnswer.GRANTED

    def over(self, *names: str) -> None:
        assert self.redis.zrem(Keys.PERMITS, *names) == len(names)


@pytest.fixture
def line(redis: Redis) -> Iterator[Line]:
    yield Line(redis, 2)
    redis.delete(Keys.SLOTS, Keys.WAITERS, Keys.WAITERS_SEEN, Keys.BATCHES, Keys.PERMITS)


# neither starves


def test_two_trainers_in_lockstep_do_not_keep_an_episode_without_reservation_waiting(settings: Settings) -> None:
    """Each batch needs every place, and each trainer asks for its next one as soon as its last one is over."""
    stop = threading.Event()
    rounds: list[str] = []

    def train(run: str) -> None:
        with Pool(settings, run_id=run) as pool:
            while not stop.is_set():
                with pool.reserve(2, wait_seconds=30) as places:
                    pool.receipts([pool.submit(TASK, policy=SCRIPT, reservation=places) for _ in range(2)])
                rounds.append(run)

    with TinySlot(settings, "slot-a"), TinySlot(settings, "slot-b"), Pool(settings) as pool:
        trainers = [threading.Thread(target=train, args=(run,)) for run in ("run-a", "run-b")]
        try:
            for trainer in trainers:
                trainer.start()
            wait_until(lambda: {"run-a", "run-b"} <= set(rounds), description="both have had a batch", seconds=30)
            for _ in range(3):
                assert pool.submit(TASK, policy=SCRIPT).wait(timeout_seconds=20).outcome is Outcome.SOLVED
            before = len(rounds)
            wait_until(lambda: len(rounds) > before + 2, description="the trainers go on", seconds=20)
        finally:
            stop.set()
            for trainer in trainers:
                trainer.join(30)


def test_a_batch_gets_its_places_before_a_steady_backlog_that_came_later(line: Line) -> None:
    assert line.episode("e-held") is PermitAnswer.GRANTED
    assert not line.batch("r1", 2)
    for number in range(3):
        assert line.episode(f"e-{number}") is PermitAnswer.WAIT, "one place is free, and kept for the batch"
    line.over("e-held")
    assert line.episode("e-0") is PermitAnswer.WAIT
    assert line.batch("r1", 2)


def test_a_batch_waits_for_the_episodes_that_came_before_it(line: Line) -> None:
    for name in ("e-1", "e-2"):
        assert line.episode(name) is PermitAnswer.GRANTED
    assert line.episode("e-early") is PermitAnswer.WAIT
    assert not line.batch("r1", 2)
    line.over("e-1", "e-2")
    assert not line.batch("r1", 2), "one of the two is for whoever came before it, though it has not asked yet"
    assert not line.clock.limiter.reserve("r-other", 1, life_seconds=30), "and the other is kept for the batch"
    assert line.episode("e-early") is PermitAnswer.GRANTED
    assert not line.batch("r1", 2)
    line.over("e-early")
    assert line.batch("r1", 2)


def test_a_batch_larger_than_a_lowered_limit_keeps_nobody_from_what_is_free(redis: Redis) -> None:
    """It waits for the limit to be raised, which after a cap was learned may be in ten minutes."""
    line = Line(redis, 6)
    redis.hset(Keys.LIMITS, mapping={"effective": 4, "effective_at": line.clock.now, "probe_ms": 600_000, "probed": 0})
    assert not line.batch("r-large", 5)
    assert line.episode("e-1") is PermitAnswer.GRANTED
    assert line.batch("r-small", 2)
    assert not line.batch("r-next", 2), "one of the four is left"
    assert line.episode("e-2") is PermitAnswer.WAIT, "and is kept for the batch that came before"
    redis.hdel(Keys.LIMITS, "effective")
    line.over("e-1")
    line.begin("r-small", 2)
    assert not line.batch("r-next", 2), "raised again the large one is the first"
    assert not line.batch("r-large", 5)
    line.over("e-r-small-0", "e-r-small-1")
    assert line.batch("r-large", 5)
    redis.delete(Keys.SLOTS, Keys.WAITERS, Keys.WAITERS_SEEN, Keys.BATCHES, Keys.PERMITS)


def test_who_looks_sees_no_batch_whose_trainer_is_gone(line: Line) -> None:
    """Nobody else may ever ask: the autoscaler would keep workers up for it."""
    assert line.episode("e-1") is PermitAnswer.GRANTED
    assert not line.batch("r1", 2)
    assert line.clock.limiter.read().batch_places_waiting == 2
    line.clock.pass_seconds(16)
    reading = line.clock.limiter.read()
    assert (reading.batches_waiting, reading.batch_places_waiting) == (0, 0)
    line.over("e-1")


def test_an_episode_that_stepped_back_is_not_passed_by_the_next_batch(line: Line) -> None:
    assert line.batch("r1", 2)
    assert line.episode("e-1") is PermitAnswer.STEP_BACK, "its slot is for the batch"
    line.begin("r1", 2)
    assert not line.batch("r2", 2)
    line.over("e-r1-0", "e-r1-1")
    assert not line.batch("r2", 2), "nobody has asked for the place that is kept for it"
    assert line.episode("e-1") is PermitAnswer.GRANTED
    line.over("e-1")
    assert line.batch("r2", 2)


def test_who_stepped_back_does_not_keep_a_batch_waiting_for_its_job_in_a_long_queue(line: Line) -> None:
    """Another episode is served in its stead, one only; whenever it comes itself, it goes before later batches."""
    assert line.batch("r1", 2)
    assert line.episode("e-1") is PermitAnswer.STEP_BACK
    line.begin("r1", 2)
    assert not line.batch("r2", 2)
    line.over("e-r1-0", "e-r1-1")
    assert line.episode("e-other") is PermitAnswer.GRANTED
    assert line.episode("e-third") is PermitAnswer.WAIT, "it came after the batch, and nobody has left it a turn"
    line.over("e-other")
    assert line.batch("r2", 2)
    assert line.episode("e-third") is PermitAnswer.STEP_BACK
    line.begin("r2", 2)
    assert not line.batch("r3", 2)
    line.over("e-r2-0", "e-r2-1")
    assert line.episode("e-1") is PermitAnswer.GRANTED
    assert not line.batch("r3", 2)
    assert line.episode("e-third") is PermitAnswer.GRANTED
    line.over("e-1", "e-third")
    assert line.batch("r3", 2)


def test_an_episode_that_stepped_back_and_ended_keeps_no_place(farm: Farm, redis: Redis) -> None:
    beat_slots(farm, 2)
    assert farm.limiter.reserve("r1", 2, life_seconds=30)
    episode = leased(farm)
    assert farm.limiter.ask(episode[0].episode_id, reservation_id=None) is PermitAnswer.STEP_BACK
    farm.limiter.release_reservation("r1")
    assert not farm.limiter.reserve("r2", 2, life_seconds=30)
    end(farm, episode)  # cancelled in the queue, or its worker is lost
    assert redis.zcard(Keys.STEPPED_BACK) == 0
    assert farm.limiter.reserve("r2", 2, life_seconds=30)


def test_the_time_to_wait_counts_from_the_arrival_whatever_attempts_there_are(line: Line) -> None:
    assert line.clock.limiter.reserve("r1", 2, life_seconds=10_000)
    for _ in range(10):
        assert line.episode("e-1") is PermitAnswer.STEP_BACK
        line.clock.pass_seconds(90)
    line.clock.pass_seconds(1)
    assert line.episode("e-1") is PermitAnswer.OVERDUE
    line.clock.limiter.leave("e-1")
    assert line.redis.zcard(Keys.STEPPED_BACK) == 0


def test_a_second_attempt_ends_with_admission_timeout_by_the_first_ones_time(farm: Farm, redis: Redis) -> None:
    held = [running(farm), running(farm)]
    late = leased(farm)
    redis.hset(Keys.episode(late[0].episode_id), "arrived_at", int(farm.ledger.now() * 1000) - 901_000)
    since = time.monotonic()
    with pytest.raises(EpisodeAborted) as ended:
        admit(farm, late[0].episode_id, wait_seconds=900)
    assert ended.value.outcome is Outcome.ADMISSION_TIMEOUT
    assert time.monotonic() - since < PROMPT_SECONDS
    end(farm, late, *held)


def test_the_time_back_in_the_queue_is_no_waiting(farm: Farm, redis: Redis) -> None:
    """A queue may be hours long, and it went to its end for the sake of others."""
    beat_slots(farm, 2)
    held = [running(farm), running(farm)]
    spec, lease = leased(farm)
    assert farm.limiter.ask(spec.episode_id, reservation_id=None) is PermitAnswer.WAIT
    assert farm.ledger.defer(lease)
    for name in ("arrived_at", "left_at"):
        redis.hincrby(Keys.episode(spec.episode_id), name, -2_000_000)
    again = farm.ledger.take(spec.episode_id, 2, "slot-b", lease_seconds=60)
    assert again is not None
    for _ in range(2):
        assert farm.limiter.ask(spec.episode_id, reservation_id=None) is PermitAnswer.WAIT
    redis.hincrby(Keys.episode(spec.episode_id), "arrived_at", -901_000)
    assert farm.limiter.ask(spec.episode_id, reservation_id=None) is PermitAnswer.OVERDUE
    end(farm, (spec, again), *held)


def test_time_in_the_queue_before_it_first_waited_lengthens_no_wait(farm: Farm, redis: Redis) -> None:
    """It was given back by a worker that left, or for want of money."""
    beat_slots(farm, 2)
    spec, lease = leased(farm)
    assert farm.ledger.defer(lease)
    redis.hincrby(Keys.episode(spec.episode_id), "left_at", -2_000_000)
    held = [running(farm), running(farm)]
    again = farm.ledger.take(spec.episode_id, 2, "slot-b", lease_seconds=60)
    assert again is not None
    assert farm.limiter.ask(spec.episode_id, reservation_id=None) is PermitAnswer.WAIT
    redis.hincrby(Keys.episode(spec.episode_id), "arrived_at", -901_000)
    assert farm.limiter.ask(spec.episode_id, reservation_id=None) is PermitAnswer.OVERDUE
    end(farm, (spec, again), *held)


# batches among themselves


def test_batches_are_served_in_the_order_in_which_they_came(line: Line) -> None:
    assert line.batch("r1", 2)
    assert not line.batch("r2", 2)
    assert not line.batch("r3", 1)
    line.clock.limiter.release_reservation("r1")
    assert not line.batch("r3", 1), "it would fit, and came later"
    assert line.batch("r2", 2)
    line.clock.limiter.release_reservation("r2")
    assert not line.batch("r4", 2)
    assert line.batch("r3", 1)
    assert not line.batch("r4", 2)


def test_batches_that_wait_are_woken_in_order_and_none_polls(farm: Farm, redis: Redis, settings: Settings) -> None:
    order: list[str] = []
    _let_live(farm, 2)
    with Pool(settings) as pool:
        first = pool.reserve(2)

        def take(name: str) -> None:
            with pool.reserve(2, wait_seconds=60):
                order.append(name)

        threads = []
        for name in ("a", "b", "c"):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            wait_until(lambda: redis.zcard(Keys.BATCHES) == len(threads), description=f"{name} is in line")
        before, since = _commands(redis), time.monotonic()
        wait_until(lambda: time.monotonic() - since > 6, description="six seconds of waiting", seconds=20)
        waited = time.monotonic() - since
        assert _commands(redis) - before <= 3 * 2 * (waited / 5 + 1), "a question and a blocking pop in five seconds"
        since = time.monotonic()
        first.release()
        for thread in threads:
            thread.join(20)
        assert order == ["a", "b", "c"]
        assert time.monotonic() - since < PROMPT_SECONDS
    assert redis.zcard(Keys.BATCHES) == redis.zcard(Keys.WAITERS_SEEN) == 0


def test_a_batch_that_gives_up_leaves_the_line_and_wakes_the_next(farm: Farm, redis: Redis, settings: Settings) -> None:
    _let_live(farm, 2)
    held = running(farm)
    with Pool(settings) as pool, ThreadPoolExecutor(1) as threads:
        batch = threads.submit(pool.reserve, 2, wait_seconds=2)
        wait_until(lambda: redis.zcard(Keys.BATCHES), description="it is in line")
        [waiter] = queue_up(farm, 1)
        with pytest.raises(PlacesTaken, match="2 places wanted"):
            batch.result(20)
        waiter.expect_prompt(time.monotonic())
    assert redis.zcard(Keys.BATCHES) == redis.zcard(Keys.WAITERS_SEEN) == 0
    waiter.end()
    end(farm, held)


def test_a_batch_whose_trainer_died_leaves_the_line_by_itself(line: Line) -> None:
    assert line.episode("e-held") is PermitAnswer.GRANTED
    assert not line.batch("r-dead", 2)
    line.clock.pass_seconds(10)
    assert line.episode("e-1") is PermitAnswer.WAIT
    line.clock.pass_seconds(6)
    assert line.episode("e-1") is PermitAnswer.GRANTED


def test_a_reserved_batch_is_admitted_although_another_one_waits(line: Line) -> None:
    assert line.batch("r1", 2)
    assert not line.batch("r2", 2)
    line.begin("r1", 2)


def test_what_waits_is_read(line: Line) -> None:
    assert line.batch("r1", 2)
    assert line.episode("e-1") is PermitAnswer.STEP_BACK
    line.begin("r1", 2)
    assert not line.batch("r2", 2)
    assert not line.batch("r3", 1)
    reading = line.clock.limiter.read()
    assert (reading.waiting, reading.batches_waiting, reading.batch_places_waiting) == (1, 2, 3)


def _let_live(farm: Farm, count: int) -> None:
    """Slots that outlive the test."""
    farm.redis.zadd(Keys.SLOTS, {f"slot-{number}": farm.ledger.now() * 1000 + 600_000 for number in range(count)})


def _commands(redis: Redis) -> int:
    calls = cast("dict[str, dict[str, int]]", redis.info("commandstats"))
    return sum(calls.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval", "blpop"))
