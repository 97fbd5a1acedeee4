"""Lost episodes under the reconciler: one receipt, every sandbox settled, nothing judged or freed by hope."""

from __future__ import annotations

import pytest
from redis import Redis

from orchestrator.allocations import Allocations
from orchestrator.cost import Rates
from orchestrator.errors import LeaseLost
from orchestrator.keys import Keys
from orchestrator.reconciler import Report
from orchestrator.records import Allocation, EpisodeSpec
from orchestrator.rows import OpenEpisode
from orchestrator.vocabulary import AllocationState, Outcome, Role, allocation_id
from tests.support.bare_farm import a_receipt, a_request, admit, expire, intended, leased, stored
from tests.support.fake_provider import FakeProvider
from tests.support.reconcilers import LEASE_SECONDS
from tests.support.scene import LaterLedger, Scene

pytest_plugins = ["tests.support.scene"]


def test_a_lost_workers_episode_ends_worker_lost_and_its_sandbox_is_deleted(scene: Scene) -> None:
    spec, _, sandbox_id = scene.started()
    scene.kill(spec)
    report = scene.round()
    assert (report.finished, report.unresolved) == ([spec.episode_id], {})
    receipt = scene.receipt(spec)
    assert (receipt.outcome, receipt.reward) == (Outcome.WORKER_LOST, None)
    assert receipt.allocations == (allocation_id(spec.episode_id, 1, Role.POLICY),)
    assert scene.provider.running == {}
    assert scene.provider.deleted == [sandbox_id]
    assert scene.state(spec) is AllocationState.ABSENT
    assert scene.permits == 0
    assert scene.round() == Report()


def test_a_slot_that_renews_its_lease_is_left_alone(scene: Scene, redis: Redis) -> None:
    spec, lease, sandbox_id = scene.started()
    redis.zadd(Keys.LEASES, {spec.episode_id: (scene.ledger.now() + 5) * 1000})
    assert scene.round() == Report()
    assert sandbox_id in scene.provider.running
    scene.farm.ledger.allocations.absent(
        stored(scene.farm, allocation_id(spec.episode_id, 1, Role.POLICY)), lease.token, running_ms=1
    )
    scene.farm.ledger.commit(a_receipt(spec), lease.token)


def test_a_lease_that_was_over_when_it_was_looked_at_is_not_seized_when_it_was_renewed_since(scene: Scene) -> None:
    spec, lease = leased(scene.farm, lease_seconds=60)
    scene.pass_time(1000)
    renewed = []

    def renew() -> bool:
        renewed.append(scene.ledger.renew(lease, lease_seconds=60))
        return True

    assert scene.reconciler.run_once(leading=renew).finished == []
    assert renewed[0], "between the look and what was planned"
    scene.farm.ledger.commit(a_receipt(spec), lease.token)


def test_the_old_owners_late_commit_is_refused(scene: Scene) -> None:
    spec, lease, _ = scene.started()
    scene.kill(spec)
    scene.round()
    with pytest.raises(LeaseLost):
        scene.farm.ledger.commit(a_receipt(spec, Outcome.SOLVED), lease.token)
    assert scene.receipt(spec).outcome is Outcome.WORKER_LOST
    assert scene.farm.redis.hget(Keys.COUNTERS, "episodes:solved") is None


def test_the_old_owner_can_allocate_nothing_more(scene: Scene) -> None:
    spec, lease, _ = scene.started()
    scene.kill(spec)
    scene.round()
    with pytest.raises(LeaseLost):
        intended(scene.farm, spec, lease, Role.VERIFIER)
    with pytest.raises(LeaseLost):
        admit(scene.farm, spec.episode_id)
    assert scene.permits == 0


def test_both_sandboxes_of_a_lost_episode_are_settled(scene: Scene) -> None:
    spec, lease, _ = scene.started()
    row = intended(scene.farm, spec, lease, Role.VERIFIER)
    sandbox_id = scene.provider.create(a_request(spec, Role.VERIFIER)).sandbox_id
    scene.farm.ledger.allocations.created(row, sandbox_id, lease.token, creating_ms=1)
    scene.kill(spec)
    assert len(scene.round().settled) == 2
    assert scene.provider.running == {}
    assert len(scene.receipt(spec).allocations) == 2


def test_the_sandboxes_of_an_episode_whose_row_is_gone_are_settled(scene: Scene) -> None:
    spec, lease, _ = scene.started()
    intended(scene.farm, spec, lease, Role.VERIFIER)
    scene.farm.redis.delete(Keys.episode(spec.episode_id), Keys.BUDGET)  # with what it had reserved
    assert len(scene.round().settled) == 2
    assert scene.provider.running == {}
    assert scene.permits == 0
    assert not scene.farm.redis.exists(Keys.episode(spec.episode_id)), "a row without an end would stay for ever"


def test_an_undeletable_sandbox_keeps_its_permit_and_is_settled_later(scene: Scene) -> None:
    spec, _, sandbox_id = scene.started()
    scene.provider.undeletable.add(sandbox_id)
    scene.kill(spec)
    name = allocation_id(spec.episode_id, 1, Role.POLICY)
    for _ in range(3):
        report = scene.round()
        assert list(report.unresolved) == [name]
        assert sandbox_id in report.unresolved[name]
        assert scene.state(spec) is AllocationState.UNRESOLVED
        assert scene.permits == 1
    assert scene.receipt(spec).outcome is Outcome.WORKER_LOST
    assert scene.farm.redis.hget(Keys.COUNTERS, "cleanups:unresolved") == "1"
    scene.provider.undeletable.clear()
    assert scene.round().settled == [name]
    assert scene.permits == 0
    assert scene.round() == Report()


@pytest.mark.parametrize(
    ("role", "lifetime"), [(Role.POLICY, 611), (Role.VERIFIER, 120)], ids=["extended policy", "verifier"]
)
def test_an_undeletable_sandbox_frees_its_permit_when_its_longest_life_is_over(
    scene: Scene, redis: Redis, role: Role, lifetime: int
) -> None:
    spec, _, sandbox_id = scene.started(role=role)
    scene.provider.undeletable.add(sandbox_id)
    scene.kill(spec)
    scene.round()
    scene.pass_time(lifetime + 10 - LEASE_SECONDS - 10)  # the reconciler is one lease time ahead from the start
    scene.round()
    assert scene.state(spec, role) is AllocationState.UNRESOLVED
    assert scene.permits == 1
    scene.pass_time(12)
    name = allocation_id(spec.episode_id, 1, role)
    assert list(scene.round().unresolved) == [name], "the provider says that it is still there"
    assert scene.permits == 1
    scene.provider.running.clear()  # it ended by itself; its deletion is refused all the same
    report = scene.round()
    assert (report.settled, report.unresolved) == ([name], {})
    row = stored(scene.farm, name)
    assert (row.state, scene.permits) == (AllocationState.EXPIRED, 0)
    assert row.running_seconds == pytest.approx(lifetime + 10, abs=10), "it may have run, and cost, until then"
    assert redis.hget(Keys.COUNTERS, f"cost_picousd:{role}") == str(row.cost_picousd)


def test_a_deletion_answered_before_it_is_true_is_not_confirmed_absence(scene: Scene) -> None:
    spec, _, sandbox_id = scene.started()
    scene.provider.answers_before_true.add(sandbox_id)
    scene.kill(spec)
    report = scene.round()
    assert list(report.unresolved) == [allocation_id(spec.episode_id, 1, Role.POLICY)]
    assert scene.state(spec) is AllocationState.UNRESOLVED
    assert scene.permits == 1
    scene.provider.answers_before_true.clear()
    scene.round()
    assert scene.state(spec) is AllocationState.ABSENT
    assert scene.permits == 0


def test_one_that_cannot_be_settled_does_not_keep_the_others_waiting(scene: Scene) -> None:
    first, _, stuck = scene.started()
    second, _, _ = scene.started()
    scene.provider.undeletable.add(stuck)
    for spec in (first, second):
        scene.kill(spec)
    report = scene.round()
    assert sorted(report.finished) == sorted([first.episode_id, second.episode_id])
    assert list(scene.provider.running) == [stuck]
    scene.provider.undeletable.clear()
    scene.round()


def test_a_rival_that_takes_over_half_way_costs_a_round_and_no_more(scene: Scene) -> None:
    """While one reconciler deletes, its lease runs out and another one finishes the episode."""
    spec, _, sandbox_id = scene.started()
    other, _, _ = scene.started()
    scene.provider.undeletable.add(sandbox_id)

    class SlowProvider(FakeProvider):
        def delete(self, sandbox: str) -> None:
            if sandbox == sandbox_id:
                expire(scene.farm.redis, spec.episode_id)
                token = scene.farm.ledger.seize(spec.episode_id, "rival", lease_seconds=30)
                assert token is not None
                scene.farm.ledger.commit(a_receipt(spec, Outcome.WORKER_LOST), token)
            scene.provider.delete(sandbox)

    slow = SlowProvider(running=scene.provider.running)
    reconciler = scene.watcher("slow", slow)
    scene.pass_time(LEASE_SECONDS)
    for lost in (spec, other):
        scene.kill(lost)
    report = reconciler.run_once()
    assert report.finished == [other.episode_id]
    assert set(report.unresolved) == {spec.episode_id, allocation_id(spec.episode_id, 1, Role.POLICY)}
    assert scene.receipt(spec).detail is None, "the rival's receipt stands"
    scene.provider.undeletable.clear()
    scene.round()
    assert scene.permits == 0


def test_a_lost_episodes_sandbox_is_priced_though_nobody_noted_its_size(scene: Scene, redis: Redis) -> None:
    spec, _, _ = scene.started()
    name = allocation_id(spec.episode_id, 1, Role.POLICY)
    redis.hincrby(Keys.allocation(name), "created_at", -60_000)
    scene.kill(spec)
    scene.round()
    row = stored(scene.farm, name)
    assert row.running_seconds is not None
    assert row.running_seconds >= 60
    settings = scene.farm.settings
    per_second = 2 * settings.vcpu_usd_per_second + 0.5 * settings.gib_usd_per_second
    assert row.cost_picousd == pytest.approx(row.running_seconds * per_second * 1e12)
    assert redis.hget(Keys.COUNTERS, "cost_picousd:policy") == str(row.cost_picousd)


@pytest.mark.parametrize("created", [True, False], ids=["created", "only intended"])
def test_an_episode_that_begins_during_the_look_keeps_its_sandbox(scene: Scene, created: bool) -> None:
    """Its intent is written between any two reads of one look."""
    born: list[EpisodeSpec] = []

    def begin() -> None:
        spec, lease = leased(scene.farm, lease_seconds=600)
        row = intended(scene.farm, spec, lease)
        if created:
            sandbox_id = scene.provider.create(a_request(spec)).sandbox_id
            scene.farm.ledger.allocations.created(row, sandbox_id, lease.token, creating_ms=1)
        born.append(spec)

    class BusyAllocations(Allocations):
        def unsettled(self) -> list[Allocation]:
            begin()
            rows = super().unsettled()
            begin()
            return rows

    class BusyLedger(LaterLedger):
        def open_rows(self) -> list[OpenEpisode]:
            begin()
            rows = super().open_rows()
            begin()
            return rows

    settings = scene.farm.settings
    rates = Rates(settings.vcpu_usd_per_second, settings.gib_usd_per_second)
    ledger = BusyLedger(
        scene.farm.redis, BusyAllocations(scene.farm.redis, rates=rates, retention_seconds=60), retention_seconds=60
    )
    reconciler = scene.watcher("busy", ledger=ledger)
    assert reconciler.run_once() == Report()
    assert len(born) == 4
    assert scene.provider.deleted == []
    assert len(scene.provider.created) == (4 if created else 0)


def test_what_an_outdated_plan_names_is_left_to_the_slot_that_owns_it(scene: Scene, redis: Redis) -> None:
    """The plan's look may be wrong; before the provider is called the row is asked."""
    spec, lease = leased(scene.farm, lease_seconds=600)
    row = intended(scene.farm, spec, lease)
    redis.zrem(Keys.OPEN, spec.episode_id)  # what a look would see that had read the episodes first
    assert scene.round() == Report()
    assert (scene.provider.created, scene.provider.deleted) == ([], [])
    scene.farm.ledger.allocations.refused(row, lease.token, "never sent")
    scene.farm.ledger.commit(a_receipt(spec), lease.token)
