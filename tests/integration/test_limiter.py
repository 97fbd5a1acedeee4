"""The limiter on a real Redis: never above the limit, first come first served, woken at once, batches whole."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from orchestrator.errors import CapacityError, ConcurrencyLimited, EpisodeAborted, LeaseLost, RateLimited
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.ledger import Lease
from orchestrator.limiter import Admission
from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import Outcome
from tests.support.truth import a_receipt, admit, beat_slots, leased, opened_farm
from tests.support.waiting import wait_until

PROMPT_SECONDS = 1.0
"""A waiter that has to ask again by itself does so after BLOCK_SECONDS = 5."""

CONTENDER = """
import sys, threading
from tests.support.truth import a_receipt, a_spec, admit, leased, opened_farm

def contend(url, name, rounds, limit, highest):
    with opened_farm(url, concurrency_limit=limit) as farm:
        for number in range(rounds):
            spec, lease = leased(farm, a_spec(f"e-{name}-{number}"))
            admit(farm, spec.episode_id)
            highest.append(farm.redis.incr("test:held"))
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
def farm(redis_url: str) -> Iterator[Farm]:
    with opened_farm(redis_url, concurrency_limit=2) as farm:
        yield farm


class Waiter(threading.Thread):
    """An episode that waits in line; `granted` is what it got and `at` when."""

    def __init__(self, farm: Farm, *, check: Callable[[], None] = lambda: None, reservation: str | None = None) -> None:
        super().__init__(daemon=True)
        self.spec, self.lease = leased(farm)
        self.granted: Admission | BaseException | None = None
        self.at = 0.0
        self._farm, self._check, self._reservation = farm, check, reservation
        self.start()

    @property
    def episode_id(self) -> str:
        return self.spec.episode_id

    def run(self) -> None:
        try:
            self.granted = self._farm.limiter.admit(
                self.episode_id, reservation_id=self._reservation, wait_seconds=20, check=self._check
            )
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.granted = error
        self.at = time.monotonic()

    def wait_in_line(self) -> None:
        """Until it stands in line, and a millisecond longer: places are counted in those."""
        wait_until(
            lambda: self._farm.redis.zscore(Keys.WAITERS, self.episode_id), description=f"{self.episode_id} in line"
        )
        now = self._farm.ledger.now()
        wait_until(lambda: self._farm.ledger.now() > now + 0.002, description="the next millisecond")

    def expect_prompt(self, since: float) -> None:
        """Granted soon after `since`."""
        self.join(10)
        assert self.granted is Admission.GRANTED
        assert self.at - since < PROMPT_SECONDS, f"woken after {self.at - since:.1f} s"

    def end(self) -> None:
        self.join(20)
        self._farm.ledger.commit(a_receipt(self.spec), self.lease.token)


def running(farm: Farm) -> tuple[EpisodeSpec, Lease]:
    """An episode that has its permit."""
    spec, lease = leased(farm)
    assert admit(farm, spec.episode_id) is Admission.GRANTED
    return spec, lease


def end(farm: Farm, *episodes: tuple[EpisodeSpec, Lease]) -> None:
    for spec, lease in episodes:
        farm.ledger.commit(a_receipt(spec), lease.token)


def queue_up(farm: Farm, count: int) -> list[Waiter]:
    """So many waiters, one after another."""
    waiters = []
    for _ in range(count):
        waiters.append(Waiter(farm))
        waiters[-1].wait_in_line()
    return waiters


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
    assert max(served) < 3
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


def test_a_waiter_that_waited_long_enough_ends_with_admission_timeout(farm: Farm, redis: Redis) -> None:
    held = [running(farm), running(farm)]
    late = leased(farm)
    since = time.monotonic()
    with pytest.raises(EpisodeAborted) as refused:
        admit(farm, late[0].episode_id, wait_seconds=0.2)
    assert refused.value.outcome is Outcome.ADMISSION_TIMEOUT
    assert 0.15 < time.monotonic() - since < 2
    assert redis.zcard(Keys.WAITERS) == redis.zcard(Keys.WAITERS_SEEN) == 0
    end(farm, late, *held)


def test_an_episode_that_has_its_receipt_gets_no_permit(farm: Farm, redis: Redis) -> None:
    """A slot that was stopped for long still asks; a permit given now would be freed by nobody."""
    episode = leased(farm)
    end(farm, episode)
    with pytest.raises(LeaseLost):
        admit(farm, episode[0].episode_id)
    assert redis.zcard(Keys.PERMITS) == redis.zcard(Keys.WAITERS) == 0


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
        beat_slots(farm, 3)
        held = [running(farm) for _ in range(3)]
        [early] = queue_up(farm, 1)
        redis.zrem(Keys.PERMITS, *(spec.episode_id for spec, _ in held[:2]))  # two places are free, nobody was woken
        assert farm.limiter.reserve("r1", 2, life_seconds=30)
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
    redis.zrem(Keys.PERMITS, *(spec.episode_id for spec, _ in held))
    assert farm.limiter.reserve("r1", 2, life_seconds=30)
    since = time.monotonic()
    redis.lpush(Keys.wake(waiters[0].episode_id), "1")
    for waiter in waiters:
        waiter.join(10)
        assert waiter.granted is Admission.STEP_BACK
    assert time.monotonic() - since < 1.5, "each leaves when it is told, not when it asks by itself"
    end(farm, *held)
    for waiter in waiters:
        waiter.end()


def test_a_waiting_batch_gets_its_places_before_a_steady_backlog(farm: Farm, redis: Redis) -> None:
    beat_slots(farm, 2)
    held = running(farm)
    other = leased(farm)
    assert not farm.limiter.reserve("r1", 2, life_seconds=30, asks_again=True)
    assert not farm.limiter.reserve("r2", 1, life_seconds=30), "one place is free, and kept for the batch that waits"
    redis.persist(Keys.RESERVING)
    assert admit(farm, other[0].episode_id) is Admission.STEP_BACK
    end(farm, held, other)
    assert farm.limiter.reserve("r1", 2, life_seconds=30, asks_again=True)
    assert not redis.exists(Keys.RESERVING)


def test_a_batch_that_stops_asking_loses_its_turn(farm: Farm, redis: Redis) -> None:
    beat_slots(farm, 2)
    held = running(farm)
    assert not farm.limiter.reserve("r1", 2, life_seconds=30, asks_again=True)
    assert 0 < redis.pttl(Keys.RESERVING) <= 2000
    redis.delete(Keys.RESERVING)  # as its time does
    assert farm.limiter.reserve("r2", 1, life_seconds=30)
    end(farm, held)


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


def test_a_limit_raised_while_the_farm_runs_counts(farm: Farm, redis: Redis) -> None:
    held = [running(farm), running(farm)]
    redis.hset(Keys.LIMITS, "concurrency", 3)
    held.append(running(farm))
    end(farm, *held)


# creations


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
        for thread in runs:
            thread.start()
        for thread in runs:
            thread.join(20)
        times = sorted(both[0] + both[1])
        assert len(times) == 20
        assert times[-1] - times[0] >= 19 * 0.020 - 0.100
        assert times[-1] - times[0] < 2


def test_without_a_rate_nobody_waits(farm: Farm) -> None:
    times = create_together(farm, threads=2, each=10)
    assert times[-1] - times[0] < PROMPT_SECONDS


def test_a_rate_429_pauses_everybody(farm: Farm, redis_url: str) -> None:
    since = time.monotonic()
    assert farm.limiter.report(RateLimited("slow down", 0.6)) == pytest.approx(0.6, abs=0.01)
    assert farm.limiter.report(RateLimited("slow down", 0.1)) > 0.15, "a shorter pause does not shorten it"
    with opened_farm(redis_url) as other:
        [at] = create_together(other, threads=1, each=1)
    assert 0.59 <= at - since < 2


def test_a_rate_429_without_a_header_pauses_all_the_same(farm: Farm) -> None:
    assert farm.limiter.report(RateLimited("slow down")) > 0.5


def test_creations_stay_spaced_after_a_pause(redis_url: str) -> None:
    """Those whose places fell into the pause do not all come at its end."""
    with opened_farm(redis_url, creation_rate=20) as farm:
        times: list[float] = []
        runner = threading.Thread(target=lambda: times.extend(create_together(farm, threads=6, each=1)))
        runner.start()
        since = time.monotonic()
        wait_until(lambda: farm.redis.hexists(Keys.LIMITS, "next_creation"), description="a place is booked")
        farm.limiter.report(RateLimited("slow down", 0.4))
        runner.join(20)
        late = [at for at in times if at - since > 0.38]
        assert len(late) >= 3
        assert late[-1] - late[0] >= (len(late) - 1) * 0.05 - 0.04, late


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
