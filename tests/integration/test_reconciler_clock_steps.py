"""Redis's clock is set back by an hour: the reconciler gives the dead no more than their time."""

from __future__ import annotations

import pytest
from redis import Redis

from orchestrator.errors import ConcurrencyLimited, ProviderError
from orchestrator.keys import Keys
from orchestrator.leadership import Leadership, leader
from orchestrator.plan import SUSPECT_SECONDS, plan
from orchestrator.vocabulary import AllocationState, Outcome
from tests.support.bare_farm import a_receipt, a_spec, admit, beat_slots, intended, leased
from tests.support.clocked import age_by_step
from tests.support.reconcilers import LEASE_SECONDS
from tests.support.scene import Scene

pytest_plugins = ["tests.support.scene"]

HOUR = 3600


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_a_lease_of_before_a_step_lasts_its_time_and_one_that_is_renewed_goes_on(scene: Scene, seconds: float) -> None:
    """A machine that wakes up, or a time server that corrects a host: leases look over at once, or never."""
    living, lease, _ = scene.started()  # leases of 30 s
    dead, _, _ = scene.started()
    scene.step_clock(seconds)
    assert plan(scene.reconciler.look(), lease_seconds=LEASE_SECONDS) == []
    finished = list[str]()
    for _ in range(5):
        finished += scene.round().finished
        assert scene.ledger.renew(lease, lease_seconds=30)
        scene.pass_time(7)
    assert finished + scene.round().finished == [dead.episode_id]
    scene.kill(living)
    assert scene.round().finished == [living.episode_id]


def test_a_lease_of_before_a_step_is_given_its_own_time_and_not_the_reconcilers(scene: Scene) -> None:
    spec, _, _ = scene.started()
    scene.step_clock(-HOUR)
    assert scene.round().finished == []
    scene.pass_time(2 * LEASE_SECONDS)
    assert scene.round().finished == []
    scene.pass_time(30 - 2 * LEASE_SECONDS + 1)
    assert scene.round().finished == [spec.episode_id]


def test_a_job_that_was_suspected_before_a_step_is_enqueued(scene: Scene) -> None:
    spec = a_spec()
    scene.ledger.open(spec)
    scene.round()
    scene.pass_time(SUSPECT_SECONDS / 2)
    scene.step_clock(-HOUR)
    assert scene.round().enqueued == [], "whoever popped it is given a lease time anew"
    scene.pass_time(LEASE_SECONDS + 0.1)
    assert scene.round().enqueued == [spec.episode_id]
    scene.farm.ledger.cancel(spec.episode_id)
    assert scene.round().finished == [spec.episode_id]


def test_orphans_are_looked_for_after_a_step_as_ever(scene: Scene) -> None:
    tag = scene.ledger.farm_tag()
    scene.round()
    scene.step_clock(-HOUR)
    orphan = scene.provider.add({"farm": tag, "allocation": "e-nobodys-a1-policy"})
    scene.pass_time(10.1)
    assert scene.round().orphans == [orphan]


def test_slots_of_before_a_step_are_live_for_their_time_where_no_worker_beats(scene: Scene, redis: Redis) -> None:
    beat_slots(scene.farm, 2)
    age_by_step(redis, Keys.SLOTS)
    scene.round()
    by_then = 1000 * (scene.farm.ledger.now() + scene.farm.settings.lease_lost_seconds)
    assert redis.zcount(Keys.SLOTS, "-inf", by_then) == 2


def test_what_was_never_named_keeps_its_permit_for_its_longest_life(scene: Scene, redis: Redis) -> None:
    spec, lease = leased(scene.farm)
    admit(scene.farm, spec.episode_id)
    row = intended(scene.farm, spec, lease)
    scene.farm.ledger.allocations.unknown(row, lease.token, "lost")
    scene.farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    scene.provider.refuse_creates = ConcurrencyLimited("20 running")
    age_by_step(redis, Keys.allocation(row.allocation_id))
    assert row.allocation_id in scene.round().unresolved
    scene.pass_time(10 + 300 + 1)
    assert scene.round().settled == [row.allocation_id]
    assert (scene.state(spec), scene.permits) == (AllocationState.EXPIRED, 0)


def test_what_cannot_be_deleted_keeps_its_permit_for_its_longest_life(scene: Scene, redis: Redis) -> None:
    spec, lease, sandbox_id = scene.started()
    [row] = scene.farm.ledger.allocations.unsettled()
    scene.farm.ledger.allocations.unresolved(row, lease.token, "500")
    scene.farm.ledger.commit(a_receipt(spec, Outcome.CLEANUP_UNRESOLVED), lease.token)
    scene.provider.refuse_deletes = ProviderError("500")
    age_by_step(redis, Keys.allocation(row.allocation_id))
    assert row.allocation_id in scene.round().unresolved
    del scene.provider.running[sandbox_id]
    scene.pass_time(10 + (row.longest_seconds or 0) + 1)
    assert scene.round().settled == [row.allocation_id]
    assert (scene.state(spec), scene.permits) == (AllocationState.EXPIRED, 0)


def test_a_dead_leader_of_before_a_step_keeps_others_waiting_for_its_time(redis: Redis) -> None:
    assert Leadership(redis, "dead").take()
    age_by_step(redis, Keys.RECONCILER)
    assert not Leadership(redis, "living").take()
    assert 0 < redis.pttl(Keys.RECONCILER) <= 10_000
    assert leader(redis) == "dead"
    assert Leadership(redis, "dead").take(), "it was not dead after all"
    Leadership(redis, "living").give_back()
    assert leader(redis) == "dead"
    Leadership(redis, "dead").give_back()
    assert leader(redis) is None
