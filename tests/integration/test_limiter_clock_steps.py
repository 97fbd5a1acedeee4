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
