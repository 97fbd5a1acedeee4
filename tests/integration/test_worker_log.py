"""What a worker's log says of a job that raised: which one and why, and nothing of what the job holds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from rq import Queue, Worker
from rq.serializers import JSONSerializer

from deploy.logs import Lines
from orchestrator.queue import JOB_FUNCTION
from orchestrator.settings import Settings
from tests.support.bare_farm import TASK, a_spec
from workers.slot import SlotWorker, slot_worker

EXPECTED, SECRET = "held-out-4711", "token-0815"


@pytest.fixture
def worker(settings: Settings) -> Iterator[SlotWorker]:
    """A slot's, that has begun; this process has no slot's context, so that every episode raises."""
    worker = slot_worker(settings, "slot-log")
    worker.register_birth()  # type: ignore[no-untyped-call]
    yield worker
    worker.register_death()  # type: ignore[no-untyped-call]
    for key in worker.connection.scan_iter("rq:*"):
        worker.connection.delete(key)
    worker.connection.close()


@pytest.mark.parametrize("described", [True, False])
def test_a_job_that_raises_is_logged_without_its_arguments(
    worker: SlotWorker, caplog: pytest.LogCaptureFixture, described: bool
) -> None:
    spec = a_spec(task=TASK.model_copy(update={"envs": {"KEY": SECRET}, "expected": EXPECTED}))
    arguments = [spec.model_dump(mode="json"), 1]
    assert all(text in str(arguments) for text in (EXPECTED, SECRET))
    queue = Queue(worker.queues[0].name, connection=worker.connection, serializer=JSONSerializer)
    description = "an episode" if described else None
    queue.enqueue(JOB_FUNCTION, args=arguments, job_id=f"{spec.episode_id}-a1", description=description)
    caplog.set_level(logging.DEBUG, "rq.worker")
    taken = Worker.dequeue_job_and_maintain_ttl(worker, 1)  # the slot's own would leave a spare horse behind
    assert taken is not None
    execution = worker.prepare_execution(taken[0])
    assert not worker.perform_job(*taken, execution)

    log = "\n".join(Lines().format(record) for record in caplog.records)
    assert f"job {spec.episode_id}-a1: exception raised" in log
    assert "Traceback" in log
    assert "RuntimeError: no slot context" in log
    assert EXPECTED not in log
    assert SECRET not in log
