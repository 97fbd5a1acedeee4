"""A 429 of the concurrency kind: the limit drops to what runs, a deletion wakes, and it is probed up again."""

from __future__ import annotations

import time

import pytest
from redis import Redis

from orchestrator.errors import ConcurrencyLimited, EpisodeAborted
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.settings import Settings
from orchestrator.vocabulary import AllocationState, Outcome, Role
from tests.support.bare_farm import beat_slots, farm_settings, intended, leased, stored
from tests.support.clocked import Clocked
from tests.support.creators import Creator, create
from tests.support.line import PROMPT_SECONDS, Waiter, end, running


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=4)


def test_the_limit_drops_to_what_runs_now(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=10)
    *_, refused = farm.let_through(4)
    assert farm.refuse_concurrency(refused) == 0
    reading = farm.limiter.read()
    assert (reading.concurrency_configured, reading.concurrency_effective, reading.sandboxes) == (10, 3, 3)
    assert (reading.concurrency_limited, reading.rate_limited, reading.cooldown_seconds) == (1, 0, 0)


def test_those_with_a_permit_and_no_sandbox_wait_instead_of_being_refused_too(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=100)
    *_, refused = farm.let_through(21)
    farm.refuse_concurrency(refused)
    for _ in range(50):
        assert farm.ask(farm.new()).state == "wait"
    assert farm.ask(refused).state == "granted", "asked again under the same id: no second leave"


def test_it_is_probed_up_one_by_one_slower_while_refused(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=100)
    *_, waiting = farm.let_through(4)
    farm.refuse_concurrency(waiting)
    steps = []
    for _ in range(4):
        waiting.begin()
        began = farm.now
        while farm.ask(waiting).state == "wait":
            farm.pass_seconds(1)
        steps.append((farm.now - began) / 1000)
        assert farm.limit == 4
        farm.refuse_concurrency(waiting)
        assert farm.limit == 3
    assert steps == [5, 10, 20, 40]


def test_unrefused_probes_reach_the_configured_limit_and_no_more(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=6)
    *_, refused = farm.let_through(4)
    farm.refuse_concurrency(refused)
    seen = []
    for _ in range(3):
        waiting = farm.new()
        while farm.ask(waiting).state == "wait":
            farm.pass_seconds(1)
        seen.append(farm.limit)
    assert seen == [4, 5, 6]
    assert not redis.hexists(Keys.LIMITS, "effective")
    waiting = farm.new()
    for _ in range(50):
        assert farm.ask(waiting).state == "wait"
        farm.pass_seconds(10)
    assert farm.limit == 6


@pytest.mark.parametrize("cap", [19, 18, 10])
def test_a_cap_that_stays_costs_few_creations_however_near_it_is(redis: Redis, cap: int) -> None:
    farm = Clocked(redis, concurrency_limit=20)
    farm.let_through(cap)
    waiting, refused = farm.new(), 0
    ends = farm.now + 3_600_000
    while farm.now < ends:
        turn = waiting.ask(10)
        if turn.state == "granted":
            refused += 1
            farm.pass_seconds(0.2)
            farm.pass_seconds(farm.refuse_concurrency(waiting))
            waiting.begin()
        else:
            farm.pass_seconds(max(0.001, turn.wait_seconds))
    assert refused <= 15


def test_a_cap_is_forgotten_when_the_full_limit_has_stood_for_long(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=4)
    *_, waiting = farm.let_through(4)
    for seconds in (5, 10, 20):
        farm.refuse_concurrency(waiting)
        farm.pass_seconds(seconds)
        waiting.begin()
        assert farm.ask(waiting).state == "granted"
    assert farm.limit == 4
    farm.pass_seconds(3600)
    farm.refuse_concurrency(waiting)
    farm.pass_seconds(5)
    waiting.begin()
    assert farm.ask(waiting).state == "granted"


def test_with_nothing_running_a_refusal_is_no_deadlock(redis: Redis) -> None:
    """Somebody else fills the account: no deletion of ours will ever wake us."""
    farm = Clocked(redis, concurrency_limit=4)
    [refused] = farm.let_through()
    farm.refuse_concurrency(refused)
    assert farm.limit == 0
    refused.begin()
    assert farm.ask(refused).state == "wait"
    farm.pass_seconds(6)
    assert farm.ask(refused).state == "granted"


def test_a_fresh_deletion_explains_a_refusal_three_times(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=10)
    *_, refused = farm.let_through(4)
    rests = []
    for _ in range(4):
        redis.hset(Keys.LIMITS, "freed_at", farm.now - 1000)
        rests.append(farm.refuse_concurrency(refused))
        refused.begin()
        if len(rests) < 4:
            assert farm.limit == 10
            assert farm.ask(refused).state == "granted", "it keeps its place"
    assert all(0.37 * 2**n <= rest <= 0.63 * 2**n for n, rest in enumerate(rests[:3])), rests
    assert (rests[3], farm.limit) == (0, 3)


def test_the_refused_one_wakes_on_anothers_end_and_not_on_a_clock(farm: Farm, redis: Redis) -> None:
    held = [running(farm) for _ in range(3)]
    creations = [create(farm, spec.episode_id) for spec, _ in held]
    assert creations[2].refused(ConcurrencyLimited("2 are running")) == 0
    redis.hset(Keys.LIMITS, "probe_ms", 100_000)
    waiter = Creator(farm, held[2][0].episode_id, creation=creations[2]).in_line()
    since = time.monotonic()
    end(farm, held[0])
    assert waiter.granted() - since < 1.5, "woken by the receipt: its next look would be two seconds after the last"
    end(farm, *held[1:])
    assert farm.limiter.read().sandboxes == 0


def test_a_verifier_keeps_the_place_of_its_policy_sandbox(farm: Farm, redis: Redis) -> None:
    held = [running(farm) for _ in range(3)]
    creations = [create(farm, spec.episode_id) for spec, _ in held]
    creations[2].refused(ConcurrencyLimited("2 are running"))
    redis.hset(Keys.LIMITS, "probe_ms", 100_000)
    stuck = Creator(farm, held[2][0].episode_id, creation=creations[2]).in_line()
    create(farm, held[0][0].episode_id, Role.VERIFIER, wait_seconds=1)
    assert stuck.waiting
    end(farm, held[0])
    stuck.granted()
    end(farm, *held[1:])


def test_a_lowered_limit_is_probed_in_a_busy_farm_too(farm: Farm, redis: Redis) -> None:
    """Everybody who waits is woken by a release, at which one place less is taken."""
    held = [running(farm) for _ in range(3)]
    creations = [create(farm, spec.episode_id) for spec, _ in held]
    creations[2].refused(ConcurrencyLimited("2 are running"))
    end(farm, held[2])
    waiters = [Waiter(farm) for _ in range(3)]
    for waiter in waiters:
        waiter.wait_in_line()
    assert farm.limiter.read().concurrency_effective == 2
    redis.hset(Keys.LIMITS, "probe_ms", 0)
    end(farm, held[0])
    waiters[0].join(10)
    assert farm.limiter.read().concurrency_effective >= 3
    for waiter in waiters:
        waiter.end()
    end(farm, held[1])


def test_no_new_episode_is_admitted_above_the_lowered_limit(farm: Farm, redis: Redis) -> None:
    held = [running(farm) for _ in range(3)]
    creations = [create(farm, spec.episode_id) for spec, _ in held]
    creations[2].refused(ConcurrencyLimited("2 are running"))
    redis.hset(Keys.LIMITS, "probe_ms", 100_000)
    waiter = Waiter(farm)
    waiter.wait_in_line()
    assert farm.limiter.capacity().concurrency_limit == 2
    end(farm, held[0])  # two hold permits, one of them has no sandbox yet
    assert waiter.granted is None
    since = time.monotonic()
    end(farm, held[1])
    waiter.expect_prompt(since)
    waiter.end()
    end(farm, held[2])


def test_what_can_never_fit_is_judged_by_the_configured_limit(farm: Farm) -> None:
    beat_slots(farm, 8)
    held = running(farm)
    create(farm, held[0].episode_id).refused(ConcurrencyLimited("0 are running"))
    assert not farm.limiter.reserve("r1", 3, life_seconds=30)
    end(farm, held)


def test_a_wait_without_room_ends_with_the_deadline(farm: Farm) -> None:
    held = running(farm)
    creation = create(farm, held[0].episode_id)
    creation.refused(ConcurrencyLimited("0 are running"))
    with pytest.raises(EpisodeAborted) as ended:
        creation.wait(wait_seconds=0.2, check=lambda: None)
    assert ended.value.outcome is Outcome.DEADLINE
    end(farm, held)


def test_a_confirmed_absence_after_the_receipt_frees_the_place(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    create(farm, spec.episode_id)
    farm.ledger.allocations.created(row, "sbx1", lease.token, creating_ms=1)
    row = stored(farm, row.allocation_id)
    farm.ledger.allocations.unresolved(row, lease.token, "not deleted")
    end(farm, (spec, lease))
    assert redis.zcard(Keys.PLACES) == 1
    farm.ledger.allocations.absent(stored(farm, row.allocation_id), "*", running_ms=1)
    assert stored(farm, row.allocation_id).state is AllocationState.ABSENT
    assert redis.zcard(Keys.PLACES) == 0
    assert redis.hexists(Keys.LIMITS, "freed_at")


def test_a_lowered_limit_lets_running_episodes_finish(farm: Farm) -> None:
    held = [running(farm) for _ in range(3)]
    for spec, _ in held[:2]:
        create(farm, spec.episode_id)
    farm.limiter.change(concurrency=1)
    for spec, _ in held[:2]:
        create(farm, spec.episode_id, Role.VERIFIER, wait_seconds=1)
    late = Creator(farm, held[2][0].episode_id).in_line()
    end(farm, held[0])
    assert late.waiting, "one still runs"
    since = time.monotonic()
    end(farm, held[1])
    assert late.granted() - since < PROMPT_SECONDS
    end(farm, held[2])


def test_a_raised_limit_wakes_waiters(farm: Farm) -> None:
    farm.limiter.change(concurrency=1)
    held = running(farm)
    waiters = [Waiter(farm) for _ in range(3)]
    for waiter in waiters:
        waiter.wait_in_line()
    since = time.monotonic()
    farm.limiter.change(concurrency=4)
    for waiter in waiters:
        waiter.expect_prompt(since)
    for waiter in waiters:
        waiter.end()
    end(farm, held)
    farm.limiter.change(reset=True)
    assert farm.limiter.read().concurrency_configured == 4
    assert not farm.limiter.read().concurrency_set_live
