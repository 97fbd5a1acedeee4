"""Queued rows under the reconciler: a job that was lost is enqueued again, one that was only slow is not."""

from __future__ import annotations

import pytest
from redis import Redis
from rq import Queue, Worker
from rq.executions import Execution
from rq.job import Job
from rq.serializers import JSONSerializer

from orchestrator.keys import Keys
from orchestrator.reconciler import Report
from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import Drive, Outcome, job_id
from tests.support.bare_farm import a_receipt, a_spec, leased, opened_farm
from tests.support.reconcilers import LEASE_SECONDS
from tests.support.redis_server import leaks
from tests.support.scene import Scene

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


def test_episodes_of_another_queue_of_the_farm_keep_to_it(scene: Scene, redis_url: str, redis: Redis) -> None:
    waits, lost, ends = a_spec(), a_spec(), a_spec()
    with opened_farm(redis_url, queue="night") as night:
        for spec in (lost, waits, ends):
            night.ledger.open(spec)
            night.queue.enqueue(spec)
        assert redis.lpop(night.queue.rq.key) == job_id(lost.episode_id, 1)
        assert scene.round() == Report()
        night.ledger.cancel(ends.episode_id)
        scene.pass_time(10.5)
        report = scene.round()
        assert (report.enqueued, report.finished) == ([lost.episode_id], [ends.episode_id])
        assert night.queue.waiting() == {job_id(spec.episode_id, 1) for spec in (waits, lost)}
    assert scene.farm.queue.depth() == 0


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
    scene.farm.queue.forget(job_id(spec.episode_id, 1))


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
    scene.farm.queue.forget(job_id(spec.episode_id, 1))


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
    assert not redis.exists(Job.key_for(job_id(spec.episode_id, 1))), "its envelope went with it"


def test_an_unreadable_row_keeps_no_other_waiting(scene: Scene, redis: Redis) -> None:
    broken, sound = a_spec(), a_spec()
    for spec in (broken, sound):
        scene.farm.ledger.open(spec)
    redis.hset(Keys.episode(broken.episode_id), "spec", '{"schema_version": 99}')
    scene.round()
    scene.pass_time(10.5)
    report = scene.round()
    assert (report.enqueued, report.finished) == ([sound.episode_id], [broken.episode_id])
    assert report.unresolved == {}
    receipt = scene.receipt(broken)
    assert (receipt.outcome, receipt.run_id, receipt.task_id) == (Outcome.WORKER_LOST, broken.run_id, "unknown")
    assert "its row cannot be read by this version (schema_version: " in (receipt.detail or "")
    assert scene.round() == Report()


def test_a_lost_episode_with_an_unreadable_row_has_its_sandbox_deleted_and_a_receipt(
    scene: Scene, redis: Redis
) -> None:
    spec, _, sandbox_id = scene.started()
    redis.hset(Keys.episode(spec.episode_id), "spec", "no JSON")
    scene.kill(spec)
    assert scene.round().finished == [spec.episode_id]
    assert scene.provider.deleted == [sandbox_id]
    receipt = scene.receipt(spec)
    assert (receipt.outcome, receipt.drive, len(receipt.allocations)) == (Outcome.WORKER_LOST, Drive.AUTONOMOUS, 1)
    assert scene.permits == 0


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
    lost, _, _ = scene.started()
    scene.kill(lost)
    reconciler = scene.watcher("by-hand", sleep=scene.hang)
    assert reconciler.run_once() == Report()
    reconciler.watch(LEASE_SECONDS)
    assert reconciler.run_once().finished == [lost.episode_id]


def taken(scene: Scene, spec: EpisodeSpec) -> Execution:
    """What RQ keeps when one of its workers has taken the job, up to the horse."""
    queue = scene.farm.queue.rq
    worker = Worker([queue], name=f"w-{spec.episode_id}", connection=queue.connection, serializer=JSONSerializer)
    scene.farm.queue.enqueue(spec)
    job = Queue.dequeue_any([queue], None, connection=queue.connection, serializer=JSONSerializer)
    assert job is not None
    execution = worker.prepare_execution(job[0])
    worker.prepare_job_execution(job[0], remove_from_intermediate_queue=True)
    return execution


def test_nothing_of_rq_is_left_of_a_job_whose_worker_was_killed(scene: Scene, redis: Redis) -> None:
    spec, _, _ = scene.started()
    execution = taken(scene, spec)
    job = job_id(spec.episode_id, 1)
    assert redis.ttl(Job.key_for(job)) == -1, "it would stay for ever"
    assert redis.zrange("rq:wip:episodes", 0, -1) == [execution.composite_key]
    scene.kill(spec)
    assert scene.round().finished == [spec.episode_id]
    assert [name for name in redis.scan_iter() if job in name and redis.ttl(name) == -1] == []
    assert not redis.exists("rq:wip:episodes", execution.key)
    assert leaks(redis) == []


def test_a_job_whose_worker_died_before_the_lease_is_enqueued_as_if_nobody_had_taken_it(
    scene: Scene, redis: Redis
) -> None:
    """Otherwise RQ would after a minute take it for stuck where it was, and fail it while it waits."""
    spec = a_spec()
    scene.farm.ledger.open(spec)
    taken(scene, spec)
    redis.rpush(scene.farm.queue.rq.intermediate_queue_key, job_id(spec.episode_id, 1))
    scene.round()
    scene.pass_time(10.5)
    assert scene.round().enqueued == [spec.episode_id]
    assert scene.farm.queue.waiting() == {job_id(spec.episode_id, 1)}
    assert not redis.exists("rq:wip:episodes", scene.farm.queue.rq.intermediate_queue_key)


def test_a_job_whose_worker_was_killed_between_its_receipt_and_rqs_note_is_forgotten(
    scene: Scene, redis: Redis
) -> None:
    spec, lease = leased(scene.farm)
    taken(scene, spec)
    scene.farm.ledger.commit(a_receipt(spec), lease.token)
    others, _ = leased(scene.farm)
    taken(scene, others)
    redis.zadd(Keys.LEASES, {others.episode_id: (scene.ledger.now() + 3600) * 1000})
    scene.pass_time(10)
    assert scene.round().forgotten == [], "whoever runs it may be about to tell RQ"
    assert leaks(redis) != []
    scene.pass_time(LEASE_SECONDS)
    assert scene.round().forgotten == [job_id(spec.episode_id, 1)]
    assert leaks(redis) == []
    assert scene.farm.queue.taken() == {job_id(others.episode_id, 1)}
    assert scene.round() == Report()


@pytest.mark.parametrize("theirs", ["4711", "e-of-others-a1"])
def test_a_job_of_another_application_is_not_forgotten(scene: Scene, redis: Redis, theirs: str) -> None:
    queue = Queue("mine", connection=scene.farm.queue.rq.connection)
    job = queue.enqueue("time.sleep", 1, job_id=theirs)
    queue.pop_job_id()
    worker = Worker([queue], connection=queue.connection)
    execution = worker.prepare_execution(job)
    try:
        assert scene.farm.queue.named("mine").taken() == {theirs}
        for _ in range(3):
            scene.pass_time(2 * LEASE_SECONDS)
            assert scene.round().forgotten == []
        assert redis.exists(Job.key_for(theirs), execution.key) == 2
    finally:
        redis.delete(
            *(name for name in redis.scan_iter("rq:*") if "mine" in name or theirs in name), "rq:queues", worker.key
        )


def test_an_envelope_that_rq_lets_expire_is_left_to_it(scene: Scene, redis: Redis) -> None:
    spec, _, _ = scene.started()
    taken(scene, spec)
    redis.expire(Job.key_for(job_id(spec.episode_id, 1)), 600)  # as of a horse whose slot saw it die
    scene.kill(spec)
    assert scene.round().finished == [spec.episode_id]
    assert redis.ttl(Job.key_for(job_id(spec.episode_id, 1))) > 0
    assert not redis.exists("rq:wip:episodes")


def test_a_loss_that_two_reconcilers_saw_is_mended_and_counted_once(scene: Scene, redis: Redis) -> None:
    spec = a_spec()
    scene.farm.ledger.open(spec)
    other = scene.watcher("reconciler-other")
    scene.pass_time(LEASE_SECONDS)
    for reconciler in (other, scene.reconciler):
        reconciler.run_once()
    scene.pass_time(10.5)
    others: list[Report] = []

    def meanwhile() -> bool:
        if not others:
            others.append(other.run_once())
        return True

    report = scene.reconciler.run_once(leading=meanwhile)
    assert others[0].enqueued == [spec.episode_id]
    assert report.enqueued == [], "the other has done it since the look"
    assert redis.hget(Keys.episode(spec.episode_id), "lost_jobs") == "1"
    assert scene.farm.queue.waiting() == {job_id(spec.episode_id, 1)}


def test_a_count_whose_answer_was_lost_is_asked_for_again_and_counts_once(scene: Scene, redis: Redis) -> None:
    spec = a_spec()
    scene.farm.ledger.open(spec)
    for counted, now in ((0, 1), (0, 1), (1, 2), (1, 2), (0, 2)):
        assert scene.farm.ledger.count_lost_job(spec.episode_id, counted=counted) == now
    assert scene.farm.ledger.count_lost_job("e-gone", counted=0) == 0
    assert not redis.exists(Keys.episode("e-gone")), "a row without an end would stay for ever"
