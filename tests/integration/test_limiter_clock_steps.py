"""Redis's clock is set back by an hour: what the dead and the refused had noted before means nothing any more."""

from __future__ import annotations

import pytest
from redis import Redis

from orchestrator.keys import Keys
from orchestrator.limiter import PermitAnswer
from orchestrator.vocabulary import EpisodeState, Role
from tests.support.bare_farm import run_episode
from tests.support.clocked import Clocked

PATIENCE_MS = 15_000


@pytest.mark.parametrize("creation_rate", [0.0, 1.0])
def test_who_died_in_the_line_of_creators_before_a_step_holds_nobody_up(redis: Redis, creation_rate: float) -> None:
    farm = Clocked(redis, concurrency_limit=1, creation_rate=creation_rate)
    [holder] = farm.let_through()
    assert farm.ask(farm.new()).state == "wait", "it dies"
    farm.pass_seconds(-3600)
    redis.zrem(Keys.PLACES, holder.episode_id)
    began, living = farm.now, farm.new()
    while farm.ask(living).state == "wait":
        farm.pass_seconds(0.5)
        assert farm.now - began < 2 * PATIENCE_MS


def test_the_reconciler_drops_who_died_in_the_line_of_creators_before_a_step(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=1)
    farm.let_through()
    assert farm.ask(farm.new()).state == "wait", "it dies"
    farm.pass_seconds(-3600)
    assert farm.limiter.drop_dead_creators() == 0
    farm.pass_seconds(16)
    assert farm.limiter.drop_dead_creators() == 1
    assert redis.zcard(Keys.CREATORS) == 0


def test_who_died_in_the_line_for_permits_before_a_step_holds_nobody_up(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=1)

    def ask(name: str) -> PermitAnswer:
        run_episode(redis, name)
        return farm.limiter.ask(name, reservation_id=None)

    assert ask("e-holder") is PermitAnswer.GRANTED
    assert ask("e-dead") is PermitAnswer.WAIT
    farm.pass_seconds(-3600)
    redis.zrem(Keys.PERMITS, "e-holder")
    began = farm.now
    while ask("e-living") is not PermitAnswer.GRANTED:
        farm.pass_seconds(5)
        assert farm.now - began < 2 * PATIENCE_MS
    assert redis.zrange(Keys.WAITERS, 0, -1) == []


@pytest.mark.parametrize("reset", [False, True])
def test_a_429_that_names_nothing_teaches_as_ever(redis: Redis, reset: bool) -> None:
    farm = Clocked(redis, creation_rate=10)
    [first] = farm.let_through()
    farm.refuse_rate(first, None)
    farm.pass_seconds(-3600)
    if reset:
        farm.limiter.change(reset=True)
    before = farm.rate
    [again] = farm.let_through()
    assert farm.refuse_rate(again, None) > 0
    assert farm.rate < before


def test_a_frozen_reconciler_takes_no_place_for_what_was_settled_meanwhile(redis: Redis) -> None:
    farm = Clocked(redis)
    run_episode(redis, "e-over")
    late = farm.limiter.creation("e-over", Role.POLICY, settling=True)
    redis.hset(Keys.episode("e-over"), mapping={"state": EpisodeState.FINAL, "unsettled": 1})
    assert farm.ask(farm.limiter.creation("e-over", Role.POLICY, settling=True)).state == "granted", "it settles"
    redis.zrem(Keys.PLACES, "e-over")
    redis.hset(Keys.episode("e-over"), "unsettled", 0)
    assert farm.ask(late).state == "over"
    assert redis.zcard(Keys.PLACES) == 0


def test_what_a_dead_trainer_reserved_before_a_step_is_free_after_its_time(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=4)
    redis.zadd(Keys.SLOTS, {f"w-{n}": farm.now + 10_000_000 for n in range(4)})
    assert farm.limiter.reserve("r-dead", 3, life_seconds=120)
    farm.pass_seconds(-3600)
    assert farm.limiter.capacity().reserved == 3, "it may live"
    run_episode(redis, "e-of-it")
    assert farm.limiter.ask("e-of-it", reservation_id="r-dead") is PermitAnswer.GRANTED
    farm.pass_seconds(119)
    assert farm.limiter.capacity().reserved == 2
    farm.pass_seconds(2)
    assert farm.limiter.capacity().reserved == 0


def test_a_batch_that_died_in_line_before_a_step_holds_nobody_up(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=2)
    redis.zadd(Keys.SLOTS, {f"w-{n}": farm.now + 10_000_000 for n in range(4)})
    for name in ("e-holder", "e-waits"):
        run_episode(redis, name)
    assert farm.limiter.ask("e-holder", reservation_id=None) is PermitAnswer.GRANTED
    assert not farm.limiter.ask_places("r-dead", 2, life_seconds=10, stays=True)
    farm.pass_seconds(-3600)
    began = farm.now
    while farm.limiter.ask("e-waits", reservation_id=None) is not PermitAnswer.GRANTED:
        farm.pass_seconds(5)
        assert farm.now - began < 2 * PATIENCE_MS
    assert redis.zcard(Keys.BATCHES) == redis.zcard(Keys.WAITERS_SEEN) == 0


def test_who_stepped_back_before_a_step_holds_batches_up_no_longer_than_its_patience(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=2)
    redis.zadd(Keys.SLOTS, {f"w-{n}": farm.now + 10_000_000 for n in range(2)})
    run_episode(redis, "e-lost")
    assert farm.limiter.reserve("r-first", 2, life_seconds=10)
    assert farm.limiter.ask("e-lost", reservation_id=None) is PermitAnswer.STEP_BACK, "its job is lost"
    farm.pass_seconds(-3600)
    farm.limiter.release_reservation("r-first")
    assert not farm.limiter.reserve("r-next", 2, life_seconds=10)
    farm.pass_seconds(901)
    assert farm.limiter.reserve("r-next", 2, life_seconds=10)
    assert redis.zcard(Keys.STEPPED_BACK) == 0


def test_who_waits_since_before_a_step_waits_no_longer_than_its_patience(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=1)
    for name in ("e-holder", "e-waits"):
        run_episode(redis, name)

    def ask(name: str) -> PermitAnswer:
        return farm.limiter.ask(name, reservation_id=None, patience_seconds=60)

    assert (ask("e-holder"), ask("e-waits")) == (PermitAnswer.GRANTED, PermitAnswer.WAIT)
    farm.pass_seconds(-3600)
    assert ask("e-waits") is PermitAnswer.WAIT
    farm.pass_seconds(61)
    assert ask("e-waits") is PermitAnswer.OVERDUE
    farm.limiter.leave("e-waits")


def test_a_lowered_rate_comes_back_as_ever(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    *_, refused = farm.let_through(20)
    farm.refuse_rate(refused, 1)
    farm.pass_seconds(-3600)
    halved = farm.rate
    farm.pass_seconds(3)
    assert farm.rate > 1.7 * halved


def test_a_lowered_concurrency_limit_is_tried_again_as_ever(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=10)
    *_, refused = farm.let_through(4)
    farm.refuse_concurrency(refused)
    farm.pass_seconds(-3600)
    began, waiting = farm.now, farm.new()
    while farm.ask(waiting).state == "wait":
        farm.pass_seconds(1)
        assert farm.now - began < 10_000


def test_a_deletion_of_before_a_step_explains_no_refusal_of_long_after(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=10)
    redis.hset(Keys.LIMITS, "freed_at", farm.now)  # as a confirmed absence does
    farm.pass_seconds(-3600)
    farm.let_through(2)
    farm.pass_seconds(10)
    [refused] = farm.let_through()
    farm.refuse_concurrency(refused)
    assert farm.limit == 2


def test_how_many_ran_before_a_step_is_forgotten_as_ever(redis: Redis) -> None:
    farm = Clocked(redis, concurrency_limit=10)
    redis.hset(Keys.LIMITS, mapping={"held": 9, "held_at": farm.now})  # as nine that ran at once do
    farm.pass_seconds(-3600)
    farm.let_through(2)
    farm.pass_seconds(61)
    [refused] = farm.let_through()
    farm.refuse_concurrency(refused)
    assert (farm.limit, farm.limiter.read().cooldown_seconds) == (2, 0), "not taken for one of the rate"


def test_who_waits_for_money_since_before_a_step_waits_no_longer_than_its_patience(redis: Redis) -> None:
    farm = Clocked(redis)
    run_episode(redis, "e-poor")
    for name, value in (("run", "run-1"), ("template", "base"), ("policy_seconds", "60"), ("verifier_seconds", "60")):
        redis.hset(Keys.episode("e-poor"), name, value)
    redis.hset(Keys.BUDGET, mapping={"limit": 10**13, "reserved": 10**13})

    def ask() -> PermitAnswer:
        return farm.limiter.ask("e-poor", reservation_id=None, patience_seconds=60)

    assert ask() is PermitAnswer.STEP_BACK
    farm.pass_seconds(-3600)
    assert ask() is PermitAnswer.STEP_BACK
    farm.pass_seconds(61)
    assert ask() is PermitAnswer.FARM_BUDGET
    redis.delete(Keys.BUDGET)
