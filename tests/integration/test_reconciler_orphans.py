"""Sandboxes that are ours and nobody's: deleted, counted once, kept by id until gone; all others are left alone."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from redis import Redis

from orchestrator.errors import OutcomeUnknown, RateLimited
from orchestrator.keys import Keys
from orchestrator.plan import DeleteOrphan, plan
from orchestrator.provider import SandboxRow
from orchestrator.reconciler import Report
from orchestrator.status import Status, read_status
from orchestrator.unresolved import Kind
from orchestrator.vocabulary import AllocationState, Drive, Outcome, Role, allocation_id
from tests.support.bare_farm import a_receipt, a_request, a_spec, intended, leased
from tests.support.clocked import age_by_step
from tests.support.fake_provider import FakeProvider
from tests.support.reconcilers import LEASE_SECONDS
from tests.support.redis_server import exact
from tests.support.scene import Scene

pytest_plugins = ["tests.support.scene"]

SWEEP_SECONDS = 10.5


def tags(scene: Scene, allocation: str = "e-gone-a1-policy", **changes: str) -> dict[str, str]:
    """What the executor puts on a sandbox."""
    return {"farm": scene.ledger.farm_tag(), "allocation": allocation, "episode": "e-gone", "role": "policy", **changes}


def sweep(scene: Scene) -> Report:
    """A round in which the next sweep is due."""
    scene.pass_time(SWEEP_SECONDS)
    return scene.round()


def counted(redis: Redis) -> int:
    return int(str(redis.hget(Keys.COUNTERS, "orphans_deleted") or 0))


def status(scene: Scene) -> Status:
    farm = scene.farm
    return read_status(farm)


def test_an_orphan_is_deleted_and_counted_and_what_is_not_ours_survives_a_list_that_ignores_its_filter(
    scene: Scene, redis: Redis
) -> None:
    orphan = scene.provider.add(tags(scene))
    bare = scene.provider.add({"farm": scene.ledger.farm_tag()})
    foreign = [
        scene.provider.add({}),
        scene.provider.add({"allocation": "e-gone-a1-policy"}),
        scene.provider.add(tags(scene, farm="another-farm")),
        scene.provider.add(tags(scene, farm="")),
    ]
    scene.provider.ignore_filter = True
    assert sorted(scene.round().orphans) == sorted([orphan, bare])
    assert list(scene.provider.running) == foreign
    assert sorted(scene.provider.deleted) == sorted([orphan, bare])
    assert counted(redis) == 2
    assert sweep(scene) == Report()
    assert counted(redis) == 2
    assert scene.ledger.unresolved.items() == []


def test_a_farm_without_a_tag_looks_for_no_orphans(scene: Scene, redis: Redis) -> None:
    scene.provider.add({"farm": ""})
    scene.provider.ignore_filter = True
    assert scene.round() == Report()
    assert redis.get(Keys.TAG) is None
    assert len(scene.provider.running) == 1


def test_a_running_episodes_sandboxes_are_no_orphans(scene: Scene, redis: Redis) -> None:
    scene.ledger.farm_tag()
    redis.set(Keys.TAG, "tag-of-ours")  # what a_request puts on sandboxes
    spec, lease, sandbox_id = scene.started()
    redis.zadd(Keys.LEASES, {spec.episode_id: (scene.ledger.now() + 600) * 1000})
    row = intended(scene.farm, spec, lease, Role.VERIFIER)
    scene.provider.create(a_request(spec, Role.VERIFIER))  # its answer is on its way
    assert scene.round() == Report()
    assert len(scene.provider.running) == 2
    scene.farm.ledger.allocations.unknown(row, lease.token, "lost")
    assert sweep(scene) == Report()
    assert sandbox_id in scene.provider.running
    assert len(scene.provider.running) == 2
    scene.kill(spec)
    scene.round()
    assert scene.provider.running == {}


def test_a_newborn_is_not_taken_for_an_orphan(scene: Scene, redis: Redis) -> None:
    """Its intent is written, and it is created, while the provider's list is on its way to us."""
    redis.set(Keys.TAG, "tag-of-ours")
    born: list[str] = []

    class SlowList(FakeProvider):
        def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
            spec, lease = leased(scene.farm, lease_seconds=600)
            intended(scene.farm, spec, lease)
            born.append(self.create(a_request(spec)).sandbox_id)
            return super().list(metadata)

    provider = SlowList()
    reconciler = scene.watcher("slow", provider)
    view = reconciler.look()
    assert [row.sandbox_id for row in view.sandboxes] == born, "the list had it"
    assert plan(view, lease_seconds=LEASE_SECONDS) == []


def test_a_late_creation_of_a_settled_allocation_is_found_and_deleted(scene: Scene, redis: Redis) -> None:
    """A frozen slot wakes up after its episode was given up, and its create request arrives only now."""
    redis.set(Keys.TAG, "tag-of-ours")
    spec, lease = leased(scene.farm)
    row = intended(scene.farm, spec, lease)
    scene.farm.ledger.allocations.refused(row, lease.token, "nothing was sent")
    scene.farm.ledger.commit(a_receipt(spec), lease.token)
    scene.round()
    late = scene.provider.create(a_request(spec)).sandbox_id
    assert sweep(scene).orphans == [late]
    assert scene.provider.running == {}


def test_a_second_sandbox_under_one_key_is_an_orphan_and_the_named_one_is_not(scene: Scene, redis: Redis) -> None:
    redis.set(Keys.TAG, "tag-of-ours")
    spec, _, named = scene.started()
    redis.zadd(Keys.LEASES, {spec.episode_id: (scene.ledger.now() + 600) * 1000})
    twin = scene.provider.add(a_request(spec).metadata)
    assert scene.round().orphans == [twin]
    assert list(scene.provider.running) == [named]
    scene.kill(spec)
    scene.round()


def test_one_that_vanished_by_itself_is_neither_deleted_nor_counted(scene: Scene, redis: Redis) -> None:
    """Between the list and the look a normal end confirmed it absent."""

    class Vanishing(FakeProvider):
        def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
            rows = super().list(metadata)
            self.running.clear()
            return rows

    provider = Vanishing()
    provider.add(tags(scene))
    reconciler = scene.watcher("quick", provider)
    assert reconciler.run_once() == Report()
    assert provider.deleted == []
    assert counted(redis) == 0


def test_an_orphan_whose_tag_changed_under_us_is_left_alone(scene: Scene) -> None:
    """The list says ours, the sandbox's own row says otherwise: the row is believed."""

    asked: list[Mapping[str, str]] = []

    class Lying(FakeProvider):
        def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
            asked.append(metadata)
            return [SandboxRow(row.sandbox_id, tags(scene), 0.0, 2, 512) for row in self.running.values()]

    tags(scene)  # the farm has a tag by then, or nothing is listed
    provider = Lying()
    provider.add({"farm": "another-farm"})
    reconciler = scene.watcher("told", provider)
    assert reconciler.run_once() == Report()
    assert asked
    assert provider.deleted == []


@pytest.mark.parametrize("stuck", ["undeletable", "answers_before_true"])
def test_an_orphan_that_stays_is_kept_and_shown_by_id_until_it_is_gone(scene: Scene, redis: Redis, stuck: str) -> None:
    orphan = scene.provider.add(tags(scene))
    getattr(scene.provider, stuck).add(orphan)
    for _ in range(3):
        report = scene.round()
        assert (report.orphans, list(report.unresolved)) == ([], [orphan])
    [item] = status(scene).not_settled
    assert (item.kind, item.id) == (Kind.SANDBOX, orphan)
    assert orphan in item.reason
    assert json.loads(json.dumps(status(scene).as_json()))["not_settled"][0]["id"] == orphan
    assert counted(redis) == 0
    getattr(scene.provider, stuck).clear()
    assert scene.round().orphans == [orphan], "without waiting for the next sweep"
    assert status(scene).not_settled == ()
    assert status(scene).orphans_deleted == counted(redis) == 1


def test_an_orphan_begun_by_a_reconciler_that_died_is_counted_by_the_next_once(scene: Scene, redis: Redis) -> None:
    orphan = scene.provider.add(tags(scene))
    scene.ledger.unresolved.keep(Kind.SANDBOX, orphan, "its deletion was begun", now=scene.ledger.now())
    scene.provider.running.clear()  # it had been deleted when its deleter died
    assert scene.round().orphans == [orphan]
    assert scene.round() == Report()
    assert counted(redis) == 1
    scene.ledger.unresolved.strike_deleted_orphan(orphan)  # said again after a lost answer
    assert counted(redis) == 1


def test_a_provider_that_cannot_be_listed_is_shown_until_it_can_and_proves_nothing(scene: Scene) -> None:
    orphan = scene.provider.add(tags(scene))
    scene.provider.refuse_list = OutcomeUnknown("no answer")
    assert scene.round().unresolved == {"list": "no answer"}
    assert [item.kind for item in status(scene).not_settled] == [Kind.PROVIDER]
    assert orphan in scene.provider.running
    scene.provider.refuse_list = None
    assert sweep(scene).orphans == [orphan]
    assert status(scene).not_settled == ()


def test_the_list_is_asked_for_at_its_own_pace(scene: Scene) -> None:
    scene.round()
    late = scene.provider.add(tags(scene))
    assert scene.round() == Report()
    assert sweep(scene).orphans == [late]


def test_a_sandbox_that_stays_is_listed_since_the_first_time_and_shown_once(scene: Scene, redis: Redis) -> None:
    spec, _, _ = scene.started()
    name = allocation_id(spec.episode_id, 1, Role.POLICY)
    scene.provider.undeletable.update(scene.provider.running)
    scene.kill(spec)
    scene.round()
    seen = status(scene)
    assert [row.allocation_id for row in seen.unresolved] == [name]
    assert seen.not_settled == (), "an allocation is shown once"
    assert [item.id for item in scene.ledger.unresolved.items()] == [name]
    since = scene.ledger.unresolved.items()[0].since
    scene.pass_time(60)
    scene.round()
    assert scene.ledger.unresolved.items()[0].since == since
    scene.provider.undeletable.clear()
    scene.round()
    assert scene.ledger.unresolved.items() == []
    assert redis.exists(Keys.UNRESOLVED) == 0
    assert scene.state(spec) is AllocationState.ABSENT


def test_a_dry_run_plans_everything_and_changes_nothing(scene: Scene, redis: Redis) -> None:
    lost, _, _ = scene.started()
    scene.kill(lost)
    orphan = scene.provider.add(tags(scene))
    foreign = scene.provider.add({"farm": "another-farm"})
    scene.farm.ledger.open(lost.model_copy(update={"episode_id": "e-queued"}))
    scene.farm.ledger.cancel("e-queued")
    remote, lease = leased(
        scene.farm, a_spec(drive=Drive.REMOTE, policy=None, trainer_id="trainer-1"), lease_seconds=3600
    )
    scene.farm.presence.beat_trainer("trainer-1")
    age_by_step(redis, Keys.trainer("trainer-1"))  # a heartbeat that a round which acts would cut short
    dry = scene.watcher("dry", only_looks=True)
    scene.pass_time(LEASE_SECONDS)
    before, running = exact(redis), dict(scene.provider.running)
    calls = (list(scene.provider.deleted), list(scene.provider.created))
    dry.watch(0.01)
    actions = plan(dry.look(sweep=True), lease_seconds=LEASE_SECONDS)
    assert [type(action).__name__ for action in actions] == ["Finish", "End", "DeleteOrphan"]
    assert actions[-1] == DeleteOrphan(orphan, "e-gone-a1-policy")
    scene.provider.refuse_list = RateLimited("429", retry_after_seconds=30)
    dry.look(sweep=True)
    assert exact(redis) == before
    assert scene.provider.running == running
    assert (scene.provider.deleted, scene.provider.created) == calls
    with pytest.raises(RuntimeError, match="only looks"):
        dry.run_once()
    scene.provider.refuse_list = None
    scene.farm.ledger.commit(a_receipt(remote), lease.token)
    sweep(scene)
    assert list(scene.provider.running) == [foreign]
    assert scene.receipt(lost).outcome is Outcome.WORKER_LOST
