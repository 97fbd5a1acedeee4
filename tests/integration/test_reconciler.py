"""The reconciler on real rows, with a provider that misbehaves on request: nothing lost, nothing freed by hope."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from redis import Redis

from orchestrator.errors import ConcurrencyLimited, LeaseLost, OutcomeUnknown
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.ledger import Lease, Ledger
from orchestrator.limiter import Admission
from orchestrator.reconciler import Reconciler, Report
from orchestrator.records import EpisodeSpec, Receipt
from orchestrator.rounds import run_rounds
from orchestrator.vocabulary import AllocationState, EpisodeState, Outcome, Role, allocation_id, job_id
from tests.support.fake_provider import FakeProvider
from tests.support.truth import a_receipt, a_request, a_spec, admit, expire, intended, leased, opened_farm, stored
from tests.support.waiting import wait_until

LEASE_SECONDS = 12.0


class LaterLedger(Ledger):
    """A ledger whose clock is ahead by `ahead` seconds: how tests let time pass."""

    ahead = 0.0

    def now(self) -> float:
        """Redis's time, later."""
        return super().now() + self.ahead


@dataclass
class Scene:
    """A farm, a provider and a reconciler that has looked at them for longer than a lease."""

    farm: Farm
    provider: FakeProvider
    ledger: LaterLedger
    reconciler: Reconciler

    def pass_time(self, seconds: float) -> None:
        """Let time pass for the reconciler."""
        self.ledger.ahead += seconds

    def round(self) -> Report:
        """One round."""
        return self.reconciler.run_once()

    def started(self, *, role: Role = Role.POLICY) -> tuple[EpisodeSpec, Lease, str]:
        """A running episode with its permit and one sandbox; the sandbox's id."""
        spec, lease = leased(self.farm)
        assert admit(self.farm, spec.episode_id) is Admission.GRANTED
        row = intended(self.farm, spec, lease, role)
        sandbox_id = self.provider.create(a_request(spec, role)).sandbox_id
        self.farm.ledger.allocations.created(row, sandbox_id, lease.token, creating_ms=10)
        return spec, lease, sandbox_id

    def kill(self, spec: EpisodeSpec) -> None:
        """Let the episode's slot have died one lease time ago."""
        expire(self.farm.redis, spec.episode_id)

    def receipt(self, spec: EpisodeSpec) -> Receipt:
        """Its one receipt."""
        settled = self.farm.ledger.receipt(spec.episode_id)
        assert settled is not None, "no receipt"
        return settled.receipt

    def state(self, spec: EpisodeSpec, role: Role = Role.POLICY) -> AllocationState:
        """Where its sandbox stands."""
        return stored(self.farm, allocation_id(spec.episode_id, 1, role)).state

    @property
    def permits(self) -> int:
        """How many are held."""
        return int(self.farm.redis.zcard(Keys.PERMITS))


@pytest.fixture
def scene(redis_url: str) -> Iterator[Scene]:
    with opened_farm(redis_url, concurrency_limit=5) as farm:
        provider = FakeProvider(started_at=farm.ledger.now())
        ledger = LaterLedger(
            farm.redis, farm.ledger.allocations, retention_seconds=farm.settings.receipt_retention_seconds
        )
        reconciler = Reconciler(
            "reconciler-test", ledger=ledger, queue=farm.queue, provider=provider, lease_seconds=LEASE_SECONDS
        )
        opened = Scene(farm, provider, ledger, reconciler)
        opened.pass_time(LEASE_SECONDS)
        yield opened


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


def test_a_lease_that_looks_over_to_a_wrong_clock_is_not_seized(scene: Scene) -> None:
    """The plan may be wrong; the script that seizes asks Redis's own clock."""
    spec, lease = leased(scene.farm, lease_seconds=60)
    scene.pass_time(1000)
    assert scene.round().finished == []
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
    scene.pass_time(10 + 300 - LEASE_SECONDS - 2)  # the reconciler is one lease time ahead from the start
    assert row.allocation_id in scene.round().unresolved
    assert scene.permits == 1
    scene.pass_time(4)
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
    assert scene.round().settled == [row.allocation_id]
    assert scene.permits == 0


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
    reconciler = Reconciler(
        "slow", ledger=scene.ledger, queue=scene.farm.queue, provider=slow, lease_seconds=LEASE_SECONDS
    )
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


def test_a_row_whose_job_never_reached_the_queue_is_enqueued(scene: Scene) -> None:
    spec = a_spec()
    scene.farm.ledger.open(spec)
    assert scene.round() == Report()
    assert scene.farm.queue.depth() == 0
    scene.pass_time(10.5)
    assert scene.round().enqueued == [spec.episode_id]
    assert scene.farm.queue.waiting() == {job_id(spec.episode_id, 1)}
    scene.pass_time(60)
    assert scene.round() == Report()
    assert scene.farm.queue.depth() == 1


def test_a_job_popped_by_a_worker_that_died_is_enqueued_again(scene: Scene, redis: Redis) -> None:
    spec = a_spec()
    scene.farm.ledger.open(spec)
    scene.farm.queue.enqueue(spec)
    assert redis.lpop(scene.farm.queue.rq.key) == job_id(spec.episode_id, 1)
    assert scene.round() == Report()
    scene.pass_time(10.5)
    assert scene.round().enqueued == [spec.episode_id]
    assert scene.farm.queue.waiting() == {job_id(spec.episode_id, 1)}
    lease = scene.farm.ledger.take(spec.episode_id, 1, "owner", lease_seconds=30)
    assert lease is not None
    assert scene.farm.ledger.take(spec.episode_id, 1, "the dead one, after all", lease_seconds=30) is None
    scene.farm.ledger.commit(a_receipt(spec), lease.token)


def test_a_job_that_was_only_slow_to_be_taken_is_not_enqueued_again(scene: Scene, redis: Redis) -> None:
    spec = a_spec()
    scene.farm.ledger.open(spec)
    scene.farm.queue.enqueue(spec)
    redis.lpop(scene.farm.queue.rq.key)
    scene.round()
    scene.pass_time(9)
    _, lease = leased(scene.farm, spec)
    redis.zadd(Keys.LEASES, {spec.episode_id: (scene.ledger.now() + 60) * 1000})
    scene.pass_time(9)
    assert scene.round() == Report()
    scene.farm.ledger.commit(a_receipt(spec), lease.token)


def test_a_deferred_episode_whose_slot_died_before_enqueueing_is_enqueued_under_its_next_job(scene: Scene) -> None:
    spec, lease = leased(scene.farm)
    assert scene.farm.ledger.defer(lease)
    scene.round()
    scene.pass_time(10.5)
    assert scene.round().enqueued == [spec.episode_id]
    assert scene.farm.queue.waiting() == {job_id(spec.episode_id, 2)}


def test_no_lease_is_judged_within_one_lease_time_after_an_interruption(scene: Scene) -> None:
    spec, _, sandbox_id = scene.started()
    scene.kill(spec)
    scene.reconciler.interrupted()
    assert scene.round() == Report()
    scene.pass_time(LEASE_SECONDS - 1)
    assert scene.round() == Report()
    assert sandbox_id in scene.provider.running
    scene.pass_time(1.1)
    assert scene.round().finished == [spec.episode_id]


def test_a_new_reconciler_judges_nothing_within_its_first_lease_time(scene: Scene) -> None:
    spec, _, _ = scene.started()
    scene.kill(spec)
    young = Reconciler(
        "young", ledger=scene.ledger, queue=scene.farm.queue, provider=scene.provider, lease_seconds=LEASE_SECONDS
    )
    assert young.run_once() == Report()
    scene.pass_time(LEASE_SECONDS + 0.1)
    assert young.run_once().finished == [spec.episode_id]


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


def test_an_unknown_creation_is_priced_from_when_the_provider_says_it_started(scene: Scene, redis: Redis) -> None:
    spec, lease = leased(scene.farm)
    row = intended(scene.farm, spec, lease)
    now = scene.farm.ledger.now()
    redis.hset(Keys.allocation(row.allocation_id), "intended_at", int((now - 100) * 1000))
    scene.provider.started_at = now - 60
    scene.provider.lose_create_answers = 1
    with pytest.raises(OutcomeUnknown):
        scene.provider.create(a_request(spec))
    scene.kill(spec)
    scene.round()
    running = stored(scene.farm, row.allocation_id).running_seconds
    assert running == pytest.approx(60 + LEASE_SECONDS, abs=2)


def test_one_reconciler_leads_at_a_time_and_hands_over(scene: Scene, redis_url: str, redis: Redis) -> None:
    spec, lease = leased(scene.farm, lease_seconds=60)
    reports: dict[str, list[Report]] = {"a": [], "b": []}
    stops = {name: threading.Event() for name in reports}

    def rounds(name: str) -> None:
        with opened_farm(redis_url) as farm:
            reconciler = Reconciler(
                name, ledger=farm.ledger, queue=farm.queue, provider=FakeProvider(), lease_seconds=0.1
            )
            run_rounds(
                farm.redis, reconciler, name, every_seconds=0.02, stop=stops[name], on_report=reports[name].append
            )

    threads = {name: threading.Thread(target=rounds, args=(name,)) for name in reports}
    for thread in threads.values():
        thread.start()
    wait_until(lambda: len(reports["a"]) + len(reports["b"]) > 5, description="a few rounds")
    first, second = ("a", "b") if reports["a"] else ("b", "a")
    assert reports[second] == []
    assert 0 < redis.pttl(Keys.RECONCILER) <= 10_000
    stops[first].set()
    threads[first].join(10)
    wait_until(lambda: reports[second], seconds=5, description="the other leads")
    stops[second].set()
    threads[second].join(10)
    assert redis.get(Keys.RECONCILER) is None
    row = scene.farm.ledger.row(spec.episode_id)
    assert row is not None
    assert row.state is EpisodeState.RUNNING
    scene.farm.ledger.commit(a_receipt(spec), lease.token)
