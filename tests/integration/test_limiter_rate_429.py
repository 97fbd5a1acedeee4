"""A 429 of the rate kind, on a real Redis and a clock of the test's own: pause, halve, remember, come back, probe."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from redis import Redis

from orchestrator.errors import RateLimited
from orchestrator.keys import Keys
from orchestrator.limiter import PermitAnswer
from orchestrator.vocabulary import Role
from tests.support.bare_farm import run_episode
from tests.support.clocked import Clocked


def test_everybody_pauses_until_retry_after(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    [refused] = farm.let_through()
    assert farm.refuse_rate(refused, 3) == 3
    other = Clocked(redis, creation_rate=10, now=farm.now, numbers=100)
    waiting = other.new()
    assert other.ask(waiting).wait_seconds == 2.0, "no sleep is longer than a look apart"
    other.pass_seconds(2)
    assert other.ask(waiting).wait_seconds == 1.0
    other.pass_seconds(1)
    assert other.ask(waiting).state == "granted"


def test_a_shorter_pause_does_not_shorten_a_longer_one(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    first, second = farm.let_through(2)
    assert farm.refuse_rate(first, 5) == 5
    assert farm.refuse_rate(second, 1) == 5


def test_without_a_header_pauses_grow_and_are_jittered(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    pauses = []
    for _ in range(8):
        [refused] = farm.let_through()
        pauses.append(farm.refuse_rate(refused, None))
        farm.pass_seconds(pauses[-1] + 1)
    assert all(0.74 * 2**n <= pause <= 1.26 * 2**n for n, pause in enumerate(pauses[:5])), pauses
    assert all(pause <= 38 for pause in pauses)
    assert len({round(pause / 2**n, 3) for n, pause in enumerate(pauses[:5])}) > 1
    farm.pass_seconds(120)
    [refused] = farm.let_through()
    assert farm.refuse_rate(refused, None) <= 1.26, "after a quiet time it begins again"


def test_the_rate_is_halved_comes_back_fast_and_probes_slowly(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    farm.let_through(40)
    [refused] = farm.let_through()
    farm.refuse_rate(refused, 1)
    remembered = farm.limiter.read().refused_rate
    assert remembered == pytest.approx(10, rel=0.03)
    rates = []
    for _ in range(30):
        rates.append(farm.rate)
        farm.pass_seconds(0.5)
    assert rates[:3] == pytest.approx([remembered / 2] * 3)  # during the pause and at its end
    assert rates[6] == pytest.approx(0.97 * remembered), "two seconds later it is just under what was refused"
    assert all(later >= earlier for earlier, later in pairwise(rates))
    assert max(rates) < remembered, "and stays there for a while"


@pytest.mark.parametrize("refused", [2, 4, 5, 10])
def test_an_early_refusal_does_not_halve_what_is_remembered(redis: Redis, refused: int) -> None:
    farm = Clocked(redis, creation_rate=5)
    last = farm.let_through(refused)[-1]
    farm.refuse_rate(last, 1)
    assert farm.limiter.read().refused_rate == pytest.approx(5)


def test_the_configured_rate_is_never_exceeded_and_is_reached_again(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    farm.let_through(40)
    [refused] = farm.let_through()
    farm.refuse_rate(refused, 1)
    farm.redis.hset(Keys.LIMITS, "refused_rate", 5)
    farm.pass_seconds(30)
    assert farm.rate < 5
    farm.pass_seconds(15)
    assert 5 < farm.rate < 5.1
    farm.pass_seconds(3600)
    assert farm.rate == 10


def test_one_burst_of_refusals_halves_once(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=20)
    farm.let_through(20)
    burst = farm.let_through(5)
    farm.refuse_rate(burst[0], 1)
    remembered = farm.limiter.read().refused_rate
    for late in burst[1:]:
        farm.pass_seconds(0.1)
        farm.refuse_rate(late, 1)
    reading = farm.limiter.read()
    assert reading.refused_rate == remembered
    assert reading.rate_effective == pytest.approx(remembered / 2)
    assert (reading.rate_limited, reading.creations) == (5, 25)


def test_a_refusal_after_the_pause_is_another_event(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=20)
    farm.let_through(40)
    [refused] = farm.let_through()
    farm.refuse_rate(refused, 1)
    before = farm.rate
    farm.pass_seconds(1)
    [again] = farm.let_through()
    farm.refuse_rate(again, 1)
    assert farm.rate < before


def test_the_same_report_twice_counts_once(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=20)
    [refused] = farm.let_through()
    farm.refuse_rate(refused, 1)
    farm.pass_seconds(0.5)
    assert farm.refuse_rate(refused, 1) == 0.5
    assert farm.limiter.read().rate_limited == 1


def test_without_a_configured_rate_one_is_learned(redis: Redis) -> None:
    farm = Clocked(redis)
    assert farm.rate == 0
    for _ in range(30):  # what really goes on: ten a second
        farm.let_through()
        farm.pass_seconds(0.1)
    [refused] = farm.let_through()
    farm.refuse_rate(refused, 1)
    assert farm.limiter.read().refused_rate == pytest.approx(10, rel=0.1)
    farm.pass_seconds(1)
    began = farm.now
    farm.let_through(20)
    assert 2 < (farm.now - began) / 1000 < 4, "twenty creations at five to ten a second"


def test_from_one_refusal_to_the_next_the_rate_let_through_is_what_is_remembered(redis: Redis) -> None:
    """A provider of five a second that lets a burst of five pass: its bucket is empty at each refusal."""
    farm = Clocked(redis, creation_rate=20)
    tokens, at, refused, seen = 5.0, farm.now, 0, []
    for _ in range(600):
        [creation] = farm.let_through()
        tokens = min(5.0, tokens + (farm.now - at) * 5 / 1000)
        at = farm.now
        if tokens < 1:
            refused += 1
            farm.refuse_rate(creation, 1)
            seen.append(farm.limiter.read().refused_rate)
        else:
            tokens -= 1
    assert seen[1] == pytest.approx(5, rel=0.05)
    assert refused <= 0.03 * 600, seen


@pytest.mark.parametrize("configured", [5, 10])
def test_a_provider_that_lets_no_burst_pass_is_kept_busy(redis: Redis, configured: int) -> None:
    """It refuses whatever comes less than 200 ms after the last; on the way each creation is up to 15 ms late."""
    farm = Clocked(redis, creation_rate=configured)
    random, last, refused, accepted = Random(7), 0.0, 0, 0
    began = farm.now
    for _ in range(600):
        [creation] = farm.let_through()
        arrived = farm.now + random.uniform(0, 15)
        if arrived - last < 200:
            refused += 1
            farm.refuse_rate(creation, 1)
        else:
            accepted, last = accepted + 1, arrived
    assert accepted / ((farm.now - began) / 1000) > 0.8 * 5
    assert refused < 0.02 * accepted


def test_while_nobody_creates_the_rate_does_not_grow(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=20)
    farm.let_through(60)
    [refused] = farm.let_through()
    farm.refuse_rate(refused, 1)
    farm.pass_seconds(4)
    farm.let_through()
    before = farm.rate
    farm.pass_seconds(8 * 3600)
    farm.let_through()
    assert farm.rate == pytest.approx(before, rel=0.01)


def test_other_calls_pause_creations_and_leave_the_rate(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    farm.let_through(3)
    assert farm.limiter.note(RateLimited("delete: slow down", 2)) == 2
    reading = farm.limiter.read()
    assert (reading.rate_limited, reading.rate_effective, reading.refused_rate) == (0, 10, 0)
    assert farm.ask(farm.new()).state == "wait"


def test_a_refused_creation_keeps_its_place_in_line(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    farm.let_through(30)
    [first] = farm.let_through()
    later = [farm.new() for _ in range(3)]
    for waiting in later:
        assert farm.ask(waiting).state == "wait"
    farm.refuse_rate(first, 1)
    first.begin()
    assert farm.ask(first).state == "wait"
    farm.pass_seconds(1)
    for waiting in later:
        assert farm.ask(waiting).state == "wait", "one that was refused stands before those who came after it"
    assert farm.ask(first).state == "granted"


def test_refused_policies_do_not_overtake_a_verifier(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    [holder] = farm.let_through()
    farm.pass_seconds(1)
    refused = farm.let_through(5)
    for policy in refused:
        farm.refuse_rate(policy, 1)
        policy.begin()
    verifier = farm.new(Role.VERIFIER, episode_id=holder.episode_id)
    waiting = [*refused, verifier]
    for creation in waiting:
        assert farm.ask(creation).state == "wait"
    granted = []
    while waiting:
        farm.pass_seconds(0.01)
        passed = [creation for creation in waiting if farm.ask(creation).state == "granted"]
        granted += passed
        waiting = [creation for creation in waiting if creation not in passed]
    assert granted == [verifier, *refused]


def test_nobody_gives_up_for_a_rate_that_is_halved_for_a_moment(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    farm.let_through(30)
    [refused] = farm.let_through()
    line = [farm.new() for _ in range(50)]
    for waiting in line:
        assert waiting.ask(8).state == "wait"
    farm.refuse_rate(refused, 1)
    assert farm.rate < 6
    assert farm.new().ask(8).state == "wait", "six seconds at the usual rate"
    assert farm.new().ask(4).state == "too_far"


def test_a_long_pause_is_waited_for_in_line_for_a_permit_where_no_deadline_runs(redis: Redis) -> None:
    farm = Clocked(redis)
    [refused] = farm.let_through()
    farm.refuse_rate(refused, 120)
    run_episode(redis, "e-new")
    assert farm.limiter.ask("e-new", reservation_id=None) is PermitAnswer.WAIT
    farm.pass_seconds(116)
    assert farm.limiter.ask("e-new", reservation_id=None) is PermitAnswer.GRANTED


def test_a_pause_of_an_hour_is_believed_for_ten_minutes(redis: Redis) -> None:
    farm = Clocked(redis)
    [refused] = farm.let_through()
    assert farm.refuse_rate(refused, 3600) == 600


def test_the_pause_that_is_shown_is_the_one_in_force_also_after_the_clock_stepped_back(redis: Redis) -> None:
    farm = Clocked(redis, creation_rate=10)
    [refused] = farm.let_through()
    assert farm.refuse_rate(refused, 60) == 60
    farm.pass_seconds(-3600)
    assert farm.limiter.read().cooldown_seconds == 0, "nobody knows what is left of it"
    assert farm.ask(farm.new()).state == "granted"


@pytest.mark.parametrize("paused", [False, True])
def test_a_clock_that_steps_back_stops_nobody(redis: Redis, paused: bool) -> None:
    farm = Clocked(redis, creation_rate=1)
    last = farm.let_through(2)[-1]
    if paused:
        farm.refuse_rate(last, 30)
    farm.now -= 3_600_000
    began = farm.now
    [*_, last] = farm.let_through(3)
    assert farm.now - began <= 5_000, "one interval each, as ever (two where the refusal halved the rate)"
    assert farm.refuse_rate(last, 1) == 1, "no pause of before the step comes back"
