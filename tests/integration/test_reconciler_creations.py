"""Creations of unknown outcome under the reconciler: found by key or tag, or held for their longest life."""

from __future__ import annotations

import pytest
from redis import Redis

from orchestrator.errors import ConcurrencyLimited, NothingSent, OutcomeUnknown, RateLimited
from orchestrator.keys import Keys
from orchestrator.vocabulary import AllocationState, Outcome
from tests.support.bare_farm import a_receipt, a_request, admit, intended, leased, stored
from tests.support.creators import creation_of
from tests.support.reconcilers import LEASE_SECONDS
from tests.support.scene import Scene

pytest_plugins = ["tests.support.scene"]


@pytest.mark.parametrize("marked", [True, False], ids=["marked unknown", "killed before it could"])
def test_the_sandbox_of_a_lost_create_answer_is_found_by_its_key(scene: Scene, marked: bool) -> None:
    spec, lease = leased(scene.farm)
    admit(scene.farm, spec.episode_id)
    row = intended(scene.farm, spec, lease)
    scene.provider.lose_create_answers = 1
    with pytest.raises(OutcomeUnknown):
        scene.provider.create(a_request(spec))
    [sandbox_id] = scene.provider.running
    if marked:
        scene.farm.ledger.allocations.unknown(row, lease.token, "lost")
    scene.kill(spec)
    scene.round()
    assert scene.provider.deleted == [sandbox_id]
    assert scene.provider.running == {}
    assert [request.allocation_id for request in scene.provider.created] == [row.allocation_id] * 2
    assert scene.provider.created[0] == scene.provider.created[1], "the stored body, not one like it"
    assert scene.state(spec) is AllocationState.ABSENT
    assert scene.permits == 0


def test_an_unknown_creation_of_an_ended_episode_is_settled(scene: Scene) -> None:
    spec, lease = leased(scene.farm)
    admit(scene.farm, spec.episode_id)
    row = intended(scene.farm, spec, lease)
    scene.provider.lose_create_answers = 1
    with pytest.raises(OutcomeUnknown):
        scene.provider.create(a_request(spec))
    scene.farm.ledger.allocations.unknown(row, lease.token, "lost")
    scene.farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    assert scene.permits == 1
    assert scene.round().settled == [row.allocation_id]
    assert scene.provider.running == {}
    assert scene.permits == 0


def test_a_creation_that_cannot_be_repeated_is_found_by_its_tags(scene: Scene) -> None:
    spec, lease = leased(scene.farm)
    row = intended(scene.farm, spec, lease)
    scene.provider.add(a_request(spec).metadata)
    scene.farm.ledger.allocations.unknown(row, lease.token, "lost")
    scene.farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    scene.provider.refuse_creates = ConcurrencyLimited("20 running")
    assert scene.round().settled == [row.allocation_id]
    assert scene.provider.running == {}


def test_a_list_that_ignores_its_filter_costs_nobody_else_a_sandbox(scene: Scene) -> None:
    spec, lease = leased(scene.farm)
    tags = a_request(spec).metadata
    scene.provider.add({})
    scene.provider.add({"farm": "another-farm", "allocation": tags["allocation"]})
    scene.provider.add({"farm": tags["farm"], "allocation": "another-allocation"})
    scene.provider.ignore_filter = True
    scene.provider.refuse_creates = ConcurrencyLimited("20 running")
    intended(scene.farm, spec, lease)
    scene.kill(spec)
    scene.round()
    assert scene.provider.deleted == []
    assert len(scene.provider.running) == 3
    ours = scene.provider.add(tags)
    assert scene.round().settled == [tags["allocation"]]
    assert scene.provider.deleted == [ours]


def test_what_was_never_named_keeps_its_permit_until_its_longest_life_is_over(scene: Scene) -> None:
    spec, lease = leased(scene.farm)
    admit(scene.farm, spec.episode_id)
    row = intended(scene.farm, spec, lease)
    scene.provider.refuse_creates = ConcurrencyLimited("20 running")
    scene.kill(spec)
    report = scene.round()
    assert report.finished == [spec.episode_id]
    assert row.allocation_id in report.unresolved
    assert scene.state(spec) is AllocationState.UNKNOWN
    scene.pass_time(10 + 300 - LEASE_SECONDS - 10)  # the reconciler is one lease time ahead from the start
    assert row.allocation_id in scene.round().unresolved
    assert scene.permits == 1
    scene.pass_time(12)
    report = scene.round()
    assert (report.settled, report.unresolved) == ([row.allocation_id], {})
    assert scene.state(spec) is AllocationState.EXPIRED
    assert scene.permits == 0


def test_the_longest_life_counts_from_the_last_sending_and_not_from_the_intent(scene: Scene, redis: Redis) -> None:
    """Between intent and sending a slot may have waited for the limiter as long as its deadline."""
    spec, lease = leased(scene.farm)
    admit(scene.farm, spec.episode_id)
    row = intended(scene.farm, spec, lease)
    redis.hset(Keys.allocation(row.allocation_id), "intended_at", int((scene.farm.ledger.now() - 500) * 1000))
    scene.farm.ledger.allocations.unknown(row, lease.token, "its answer was lost a moment ago")
    scene.farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    scene.provider.refuse_creates = ConcurrencyLimited("20 running")
    assert row.allocation_id in scene.round().unresolved
    assert scene.permits == 1
    scene.pass_time(400)
    assert scene.round().settled == [row.allocation_id]


def test_a_provider_that_is_away_frees_nothing_and_holds_nothing_for_ever(scene: Scene) -> None:
    spec, lease = leased(scene.farm)
    admit(scene.farm, spec.episode_id)
    row = intended(scene.farm, spec, lease)
    scene.provider.refuse_creates = OutcomeUnknown("no answer")
    scene.provider.refuse_list = OutcomeUnknown("no answer")
    scene.kill(spec)
    assert row.allocation_id in scene.round().unresolved
    assert row.allocation_id in scene.round().unresolved
    assert scene.permits == 1
    scene.pass_time(400)
    assert scene.round().settled == [], "our own repetition may have created it just now"
    scene.provider.refuse_creates = NothingSent("connection refused")
    scene.pass_time(400)
    assert scene.round().settled == [row.allocation_id]
    assert scene.permits == 0


@pytest.mark.parametrize("refused_first", [False, True], ids=["deleted at once", "deletion refused at first"])
def test_an_unknown_creation_is_priced_from_when_the_provider_says_it_started(
    scene: Scene, redis: Redis, refused_first: bool
) -> None:
    spec, lease = leased(scene.farm)
    row = intended(scene.farm, spec, lease)
    redis.hset(Keys.allocation(row.allocation_id), "intended_at", int((scene.farm.ledger.now() - 100) * 1000))
    scene.provider.started_at = scene.ledger.now() - 60
    scene.provider.lose_create_answers = 1
    with pytest.raises(OutcomeUnknown):
        scene.provider.create(a_request(spec))
    [sandbox_id] = scene.provider.running
    if refused_first:
        scene.provider.undeletable.add(sandbox_id)
    scene.kill(spec)
    scene.round()
    if refused_first:
        assert scene.state(spec) is AllocationState.UNRESOLVED, "its longest life counts from here"
        scene.provider.undeletable.clear()
        scene.round()
    assert scene.state(spec) is AllocationState.ABSENT
    running = stored(scene.farm, row.allocation_id).running_seconds
    assert running == pytest.approx(60 + LEASE_SECONDS, abs=2)


def test_repeated_creations_are_paced_and_their_429_pauses_everybody(scene: Scene) -> None:
    specs = []
    for _ in range(5):
        spec, lease = leased(scene.farm)
        admit(scene.farm, spec.episode_id)
        intended(scene.farm, spec, lease)
        scene.kill(spec)
        specs.append(spec)
    scene.provider.refuse_creates = RateLimited("slow down", 60)
    for _ in range(3):
        assert len(scene.round().unresolved) == 5
    assert len(scene.provider.created) == 1
    reading = scene.farm.limiter.read()
    assert (reading.creations, reading.rate_limited, reading.policies_waiting_to_create) == (1, 1, 0)
    assert reading.cooldown_seconds > 50
    assert [scene.receipt(spec).outcome for spec in specs] == [Outcome.WORKER_LOST] * 5
    assert scene.permits == 5


def test_a_creation_is_repeated_before_those_that_wait_for_a_new_one(scene: Scene) -> None:
    """Also when its episode has its receipt already, which ends every other place in line."""
    spec, lease = leased(scene.farm)
    admit(scene.farm, spec.episode_id)
    row = intended(scene.farm, spec, lease)
    scene.farm.ledger.allocations.unknown(row, lease.token, "lost")
    scene.farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    scene.farm.limiter.change(rate=1)
    first, later = (creation_of(scene.farm, name) for name in ("e-first", "e-later"))
    assert first.ask(60).state == "granted"
    assert later.ask(60).state == "wait"
    assert scene.round().settled == [row.allocation_id]
    assert later.ask(60).state == "wait", "its turn is after the one that was settled"
    later.leave()


def test_whoever_died_in_line_is_dropped_though_nobody_asks_again(scene: Scene, redis: Redis) -> None:
    scene.farm.limiter.change(rate=0.02)
    first, dead, alive = (creation_of(scene.farm, name) for name in ("e-first", "e-dead", "e-alive"))
    assert first.ask(60).state == "granted"
    assert [one.ask(1000).state for one in (dead, alive)] == ["wait", "wait"]
    redis.zincrby(Keys.CREATORS_DUE, -14_000, dead.creation_id)
    scene.round()
    assert redis.zcard(Keys.CREATORS) == 2, "it may only be slow"
    redis.zincrby(Keys.CREATORS_DUE, -5_000, dead.creation_id)
    scene.round()
    assert redis.zrange(Keys.CREATORS, 0, -1) == redis.zrange(Keys.CREATORS_DUE, 0, -1) == [alive.creation_id]
    alive.leave()


def test_a_429_to_a_deletion_is_told_to_the_limiter_and_waited_out(scene: Scene) -> None:
    for _ in range(2):
        spec, _, _ = scene.started()
        scene.kill(spec)
    scene.provider.refuse_deletes = RateLimited("slow down", 25)
    for _ in range(2):
        assert len(scene.round().unresolved) == 2
    assert len(scene.provider.deleted) == 1
    reading = scene.farm.limiter.read()
    assert reading.rate_limited == 0, "no creation was answered so"
    assert 20 < reading.cooldown_seconds <= 25
    scene.provider.refuse_deletes = None
    scene.pass_time(26)
    assert len(scene.round().settled) == 2
    assert scene.permits == 0


def test_an_unknown_creation_that_lived_its_whole_life_unseen_costs_all_of_it(scene: Scene, redis: Redis) -> None:
    """Nobody knows since when it is gone, and a budget holds only with the most that it can have cost."""
    spec, lease = leased(scene.farm)
    admit(scene.farm, spec.episode_id)
    row = intended(scene.farm, spec, lease)
    since = int((scene.farm.ledger.now() - 305) * 1000)  # by Redis's clock, which is the one that prices
    redis.hset(Keys.allocation(row.allocation_id), "intended_at", since)
    scene.provider.lose_create_answers = 1
    with pytest.raises(OutcomeUnknown):
        scene.provider.create(a_request(spec))
    scene.farm.ledger.allocations.unknown(row, lease.token, "its answer was lost")
    scene.farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    scene.provider.running.clear()  # the provider ended it after its 300 s
    scene.ledger.ahead = 0
    scene.round()
    settled = stored(scene.farm, row.allocation_id)
    assert settled.state is AllocationState.ABSENT
    assert settled.running_seconds == pytest.approx(300, abs=5)
    assert settled.cost_picousd
