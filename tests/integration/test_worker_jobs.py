"""A real worker, two slots of it, driven through Redis: two at once, foreign jobs, and a trainer in another process."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Callback, Queue, Worker
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from orchestrator.connection import BLOCK_SECONDS, SILENT_SECONDS
from orchestrator.errors import EpisodeClosed, InfrastructureLost
from orchestrator.keys import Keys
from orchestrator.mailbox import Action, Mailbox
from orchestrator.pool import Pool
from orchestrator.queue import EXECUTABLE_EXTRAS, JOB_FUNCTION
from orchestrator.records import Script
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.policies import REPORT, candidate, repaired, script, weekly_sales
from tests.support.redis_server import check_leaks
from tests.support.waiting import wait_until
from workers.slot import SlotWorker, refuse, slot_worker

pytest_plugins = ["tests.support.farm"]

BOTH = ("policy", "verifier")


@pytest.fixture(scope="module")
def farm(ground: Ground) -> Iterator[Field]:
    """Two workers, four slots, for the whole module."""
    with open_field(ground, own_database=True) as field:
        first, second = field.start_worker("w1"), field.start_worker("w2")
        first.wait_ready()
        second.wait_ready()
        wait_until(lambda: field.farm.limiter.capacity().live_slots == 4, description="four live slots")
        yield field


@pytest.fixture
def pool(farm: Field) -> Iterator[Pool]:
    """A trainer's pool; nothing of it is left running. A slot that a test has cost is there again."""
    wait_until(lambda: farm.farm.limiter.capacity().live_slots == 4, description="four live slots")
    with Pool(farm.settings) as opened:
        yield opened
    for episode_id in opened.submitted:
        farm.wait_receipt(episode_id)
    wait_until(lambda: not farm.farm.redis.zcard(Keys.PERMITS), description="no permit held")


# two ways to drive


def test_the_bridge_example_solves_the_task(farm: Field, pool: Pool) -> None:
    task = weekly_sales()
    with pool.submit(task) as episode:
        assert "ready" in episode.reset()
        seen = episode.terminal(f"cat {REPORT}; python3 -B {REPORT}")
        assert '{"east": 5, "west": 7}' in seen
        fixed = task.files[REPORT].replace(
            '= int(row["amount"])',
            '= totals.get(row["region"], 0) + int(row["amount"])',
        )
        episode.terminal(f"printf %s {shlex.quote(fixed)} > {REPORT}")
        assert '{"east": 15, "west": 7}' in episode.terminal(f"python3 -B {REPORT}")
        assert episode.submit()
        assert farm.running(episode.episode_id) == []
        assert episode.reward() == 1.0
        with pytest.raises(EpisodeClosed):
            episode.terminal("true")
    farm.check_ended(episode.episode_id, Outcome.SOLVED, roles=BOTH)


def test_leaving_the_block_without_a_submission_cancels(farm: Field, pool: Pool) -> None:
    with pool.submit(weekly_sales()) as episode:
        episode.reset()
    farm.check_ended(episode.episode_id, Outcome.CANCELLED)
    with pytest.raises(InfrastructureLost):
        episode.terminal("true")


def test_four_slots_run_four_episodes_at_once_and_eight_come_back(farm: Field, pool: Pool) -> None:
    policies = [script("sleep 1", candidate(repaired())), script("sleep 1")]
    submitted = [pool.submit(weekly_sales(), policy=policies[n % 2]) for n in range(8)]
    receipts = [settled.receipt for settled in pool.as_completed(submitted, timeout_seconds=30)]
    assert sorted(receipt.episode_id for receipt in receipts) == sorted(e.episode_id for e in submitted)
    assert [receipt.reward for receipt in receipts].count(1.0) == 4
    spans = [(receipt.started_at or 0.0, receipt.finished_at) for receipt in receipts]
    at_once = max(sum(1 for begin, end in spans if begin <= moment < end) for moment, _ in spans)
    assert at_once == 4
    for episode in submitted:
        farm.check_ended(episode.episode_id, farm.receipt(episode.episode_id).receipt.outcome, roles=BOTH)


def test_an_action_posted_again_after_a_lost_answer_is_executed_once(farm: Field, pool: Pool) -> None:
    with pool.submit(weekly_sales()) as episode:
        episode.reset()
        mailbox = Mailbox(pool.redis, episode.episode_id)
        action = Action(name="terminal", command="echo once >> /tmp/count; cat /tmp/count")
        for _ in range(3):
            mailbox.post(1, action)
        wait_until(lambda: mailbox.result(1), description="a result")
        again = mailbox.post(1, action)
        assert again is not None
        assert again.text == "once\n"
        # its inbox holds the number no more; a slot that looks again takes nothing
        assert pool.redis.llen(Keys.mailbox(episode.episode_id, "inbox")) == 0


def test_a_reserved_batch_is_live_at_once_although_others_were_queued_before(farm: Field, pool: Pool) -> None:
    with pool.reserve(4, wait_seconds=10) as reservation, ExitStack() as batch:
        others = [pool.submit(weekly_sales(), policy=script("true")) for _ in range(4)]
        reserved = [pool.submit(weekly_sales(), reservation=reservation) for _ in range(4)]
        for episode in reserved:
            batch.enter_context(episode)
        wait_until(
            lambda: all(farm.running(episode.episode_id) for episode in reserved),
            description="four live sandboxes at once",
            seconds=20,
        )
        for episode in reserved:
            assert episode.terminal("echo here") == "here\n"
            assert not any(other.receipt() for other in others)
    for other in others:
        receipt = farm.wait_receipt(other.episode_id, 30).receipt
        assert receipt.outcome is Outcome.WRONG_ANSWER
        assert receipt.attempt < 20, "it went round and round"


def test_rq_tools_see_the_slots_as_ordinary_workers(farm: Field, pool: Pool) -> None:
    pool.submit(weekly_sales(), policy=script()).wait(20)
    assert farm.settings.redis_url is not None
    with Redis.from_url(farm.settings.redis_url) as connection:
        workers = Worker.all(connection=connection)
        assert {worker.name[:4] for worker in workers} == {"w1-1", "w1-2", "w2-1", "w2-2"}
        assert {name for worker in workers for name in worker.queue_names()} == {farm.settings.queue}
    command = [str(Path(sys.executable).parent / "rq"), "info", "--url", farm.settings.redis_url, "--raw"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert f"queue {farm.settings.queue} " in shown
    assert all(worker.name in shown for worker in workers)


# jobs that are not ours


FOREIGN = (
    "a function of the system",
    "a function by way of ours",
    "callbacks",
    "an instance",
    "pickle",
    "retries",
    "arguments that are none",
)


def enqueue(queue: Queue, kind: str, marker: Path) -> Job:
    """Put a hostile job on the queue; whatever of it runs leaves the marker."""
    connection, touch = queue.connection, f"touch {marker}"
    given: dict[str, Any] = {
        "connection": connection,
        "serializer": JSONSerializer,
        "origin": queue.name,
        "result_ttl": 60,
    }
    spec = {"anything": 1}
    match kind:
        case "a function of the system":
            job = Job.create("os.system", args=[touch], **given)
        case "a function by way of ours":
            job = Job.create("workers.jobs.os.system", args=[touch], **given)
        case "callbacks":
            back = Callback("os.system")
            job = Job.create("os.system", args=[touch], on_success=back, on_failure=back, on_stopped=back, **given)
            job._func_name = None  # type: ignore[assignment]
        case "an instance":
            job = Job.create(JOB_FUNCTION, args=[spec, 1], **given)
            job._instance = str(marker)
        case "pickle":
            job = Job.create(JOB_FUNCTION, args=[spec, 1], **given)
        case "retries":
            job = Job.create("os.system", args=[touch], **given)
            job.retries_left = 3
            job.retry_intervals = [0]
        case _:
            job = Job.create(JOB_FUNCTION, args=[spec, 1], **given)
    job.save()
    if kind == "pickle":
        connection.hset(job.key, "data", pickle.dumps(_Evil(touch)))
    if kind == "callbacks":
        connection.hset(job.key, mapping={"success_callback_name": "os.system", "failure_callback_name": "os.system"})
    connection.sadd("rq:queues", queue.key)
    queue.push_job_id(job.id)
    return job


class _Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, (self.command,)


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_job_is_failed_unrun_and_the_worker_lives_on(
    farm: Field, pool: Pool, tmp_path: Path, kind: str
) -> None:
    marker = tmp_path / "marker"
    before = sorted(pid for worker in farm.workers for pid in worker.slots().values())
    assert farm.settings.redis_url is not None
    with Redis.from_url(farm.settings.redis_url) as connection:
        queue = Queue(farm.settings.queue, connection=connection, serializer=JSONSerializer)
        job = enqueue(queue, kind, marker)
        wait_until(lambda: connection.hget(job.key, "status") in (b"failed", None), description=f"{kind} is failed")
        wait_until(lambda: queue.count == 0, description="the queue is empty")
        settled = pool.receipts([pool.submit(weekly_sales(), policy=script()) for _ in range(4)])
        assert [row.receipt.outcome for row in settled] == [Outcome.WRONG_ANSWER] * 4
        assert connection.hget(job.key, "status") in (b"failed", None)
        assert queue.count == 0, "it was put back"
    assert not marker.exists()
    assert sorted(pid for worker in farm.workers for pid in worker.slots().values()) == before
    check_leaks(farm.farm.redis)  # RQ would keep its result for ever


@pytest.mark.parametrize("ready", [True, False], ids=["spare", "fork"])
def test_a_job_that_is_swapped_after_the_slot_has_looked_runs_nothing(
    farm: Field, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    marker = tmp_path / "marker"
    foreign = zlib.compress(json.dumps(["os.system", None, [f"touch {marker}"], {}]).encode())
    with Redis.from_url(farm.settings.redis_url or "") as connection:
        queue = Queue("another", connection=connection, serializer=JSONSerializer)
        job = queue.enqueue(JOB_FUNCTION, args=[{}, 1], job_id="swapped-a1")

        def look(loaded: Job) -> str | None:
            reason = refuse(loaded)
            if os.getpid() == slot:
                connection.hset(job.key, "data", foreign)
            return reason

        slot = os.getpid()
        monkeypatch.setattr("workers.slot.refuse", look)
        if not ready:
            monkeypatch.setattr("workers.spare.SpareHorse.start", lambda spare, order: spare.dismiss())
        worker = SlotWorker([queue], name=f"swapped-{ready}", connection=connection, serializer=JSONSerializer)
        worker.work(burst=True, with_scheduler=False)
        assert not marker.exists()
        assert job.get_status() == "failed"
        job.delete()


@pytest.mark.parametrize("name", EXECUTABLE_EXTRAS)
def test_whatever_of_a_jobs_row_rq_would_execute_is_seen_as_it_was_loaded(name: str) -> None:
    webhook = json.dumps([Webhook("http://127.0.0.1:1", "failed").to_dict()])
    row = {b"data": json.dumps([JOB_FUNCTION, None, [], {}]).encode(), b"origin": b"episodes"}
    job = Job("an-id", connection=Redis(), serializer=JSONSerializer)
    job.restore(row)
    assert refuse(job) is None
    if name == "instance":
        row[b"data"] = json.dumps([JOB_FUNCTION, "something", [], {}]).encode()
    else:
        row[name.encode()] = webhook.encode() if name == "webhooks" else b"1"
    job = Job("an-id", connection=Redis(), serializer=JSONSerializer)
    job.restore(row)
    assert name in (refuse(job) or "")


def test_a_job_that_rq_itself_cannot_read_costs_one_restart_of_a_slot(farm: Field, pool: Pool) -> None:
    with Redis.from_url(farm.settings.redis_url or "") as connection:
        queue = Queue(farm.settings.queue, connection=connection, serializer=JSONSerializer)
        job = Job.create(JOB_FUNCTION, args=[1, 2], connection=connection, serializer=JSONSerializer, origin=queue.name)
        job.save()
        connection.hset(job.key, "created_at", b"\xff\xfe nonsense")
        queue.push_job_id(job.id)
        settled = pool.receipts([pool.submit(weekly_sales(), policy=script()) for _ in range(6)])
        assert [row.receipt.outcome for row in settled] == [Outcome.WRONG_ANSWER] * 6
        assert queue.count == 0
        connection.delete(job.key)
    wait_until(lambda: [len(worker.slots()) for worker in farm.workers] == [2, 2], description="four slots again")
    assert all(worker.process.poll() is None for worker in farm.workers)


def test_a_job_without_its_row_is_skipped(farm: Field) -> None:
    assert farm.settings.redis_url is not None
    spec = farm.spec(Script(commands=()))
    with Redis.from_url(farm.settings.redis_url) as connection:
        queue = Queue(farm.settings.queue, connection=connection, serializer=JSONSerializer)
        job = queue.enqueue(JOB_FUNCTION, args=[spec.model_dump(mode="json"), 1], result_ttl=60)
        wait_until(lambda: job.get_status() == "finished", description="the job is over")
        result = job.latest_result()
        assert result is not None
        assert result.return_value == {"episode": spec.episode_id, "outcome": "skipped"}
    assert farm.events(spec.episode_id) == []


def test_an_idle_slot_notices_a_redis_that_is_silently_gone(farm: Field) -> None:
    worker = slot_worker(farm.settings, "silent-1")
    assert worker.dequeue_timeout <= BLOCK_SECONDS
    assert worker.connection_timeout <= SILENT_SECONDS, "RQ makes it the timeout of every call on this connection"


def test_retries_of_rq_are_never_asked_for(farm: Field, pool: Pool) -> None:
    episode = pool.submit(weekly_sales(), policy=script())
    episode.wait(20)
    with Redis.from_url(farm.settings.redis_url or "") as connection:
        job = Job.fetch(f"{episode.episode_id}-a1", connection=connection, serializer=JSONSerializer)
        assert not job.retries_left
