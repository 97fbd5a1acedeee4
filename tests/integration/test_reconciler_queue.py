"""Queued rows under the reconciler: a job that was lost is enqueued again, one that was only slow is not."""

from __future__ import annotations

from redis import Redis

from orchestrator.keys import Keys
from orchestrator.reconciler import Reconciler, Report
from orchestrator.vocabulary import Drive, Outcome, job_id
from tests.support.scene import LEASE_SECONDS, Scene
from tests.support.truth import a_receipt, a_spec, leased

pytest_plugins = ["tests.support.scene"]


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


def test_a_job_that_kills_whoever_takes_it_ends_its_episode(scene: Scene, redis: Redis) -> None:
    spec = a_spec()
    scene.farm.ledger.open(spec)
    for _ in range(6):
        assert scene.farm.ledger.receipt(spec.episode_id) is None
        scene.round()
        redis.delete(scene.farm.queue.rq.key)
        scene.round()
        scene.pass_time(10.5)
        report = scene.round()
    assert report.finished == [spec.episode_id]
    assert scene.receipt(spec).outcome is Outcome.WORKER_LOST


def test_an_unreadable_row_keeps_no_other_waiting(scene: Scene, redis: Redis) -> None:
    broken, sound = a_spec(), a_spec()
    for spec in (broken, sound):
        scene.farm.ledger.open(spec)
    redis.hset(Keys.episode(broken.episode_id), "spec", '{"schema_version": 99}')
    scene.round()
    scene.pass_time(10.5)
    report = scene.round()
    assert report.enqueued == [sound.episode_id]
    assert len(report.unresolved) == 1


def test_queued_episodes_of_a_dead_trainer_end_without_a_worker_and_others_do_not(scene: Scene) -> None:
    gone = a_spec(drive=Drive.REMOTE, policy=None, trainer_id="trainer-gone")
    alive = a_spec(drive=Drive.REMOTE, policy=None, trainer_id="trainer-alive")
    alone = a_spec()
    scene.farm.presence.beat_trainer("trainer-alive")
    for spec in (gone, alive, alone):
        scene.farm.ledger.open(spec)
        scene.farm.queue.enqueue(spec)
    assert scene.round().finished == [gone.episode_id]
    receipt = scene.receipt(gone)
    assert (receipt.outcome, receipt.reward, receipt.allocations) == (Outcome.TRAINER_LOST, None, ())
    assert scene.farm.queue.waiting() == {job_id(alive.episode_id, 1), job_id(alone.episode_id, 1)}
    assert scene.round() == Report()


def test_no_trainer_is_lost_within_one_lease_time_after_an_interruption(scene: Scene) -> None:
    spec = a_spec(drive=Drive.REMOTE, policy=None, trainer_id="trainer-1")
    scene.farm.ledger.open(spec)
    scene.farm.queue.enqueue(spec)
    scene.reconciler.interrupted()
    assert scene.round() == Report()
    scene.pass_time(LEASE_SECONDS + 0.1)
    assert scene.round().finished == [spec.episode_id]


def test_a_cancelled_episode_ends_cancelled_whoever_finishes_it(scene: Scene) -> None:
    queued = a_spec()
    scene.farm.ledger.open(queued)
    running, _, _ = scene.started()
    for spec in (queued, running):
        scene.farm.ledger.cancel(spec.episode_id)
    scene.kill(running)
    assert sorted(scene.round().finished) == sorted([queued.episode_id, running.episode_id])
    assert scene.receipt(queued).outcome is Outcome.CANCELLED
    assert scene.receipt(running).outcome is Outcome.CANCELLED
    assert "its lease ran out" in (scene.receipt(running).detail or "")
    assert scene.provider.running == {}


def test_a_first_round_after_watching_judges_at_once(scene: Scene) -> None:
    """As `rollout-farm reconcile` does: it looks on for one lease time, then acts once."""
    lease_seconds = 0.3
    lost, _, _ = scene.started()
    scene.kill(lost)
    reconciler = Reconciler(
        "by-hand", ledger=scene.ledger, queue=scene.farm.queue, provider=scene.provider, lease_seconds=lease_seconds
    )
    assert reconciler.run_once() == Report()
    reconciler.watch(lease_seconds)
    assert reconciler.run_once().finished == [lost.episode_id]
