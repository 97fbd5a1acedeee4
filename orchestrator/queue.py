"""The RQ envelope of an episode: how a job is made, put on the queue, and which jobs a worker refuses to run.

What always holds: a job names exactly one function, by its whole name, has JSON arguments and nothing else that RQ
could execute; it is never retried and never repeated. Waiting is done on receipts and mailboxes, never on RQ results.
"""

from __future__ import annotations

from typing import Any, cast

from redis import Redis
from rq import Queue
from rq.exceptions import DuplicateJobError
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job
from rq.serializers import JSONSerializer

from orchestrator.keys import Keys
from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import job_id

JOB_FUNCTION = "workers.jobs.run_episode"
"""The one function that a worker runs; compared whole, since RQ resolves any dotted name it is given."""

KEEP_SECONDS = 600
"""How long RQ keeps a finished or failed envelope; the receipt is the record, this is for `rq info`."""

_CLEANUP_MARGIN_SECONDS = 60

EXECUTABLE_EXTRAS = (
    "instance",
    "success_callback_name",
    "failure_callback_name",
    "stopped_callback_name",
    "webhooks",
    "repeats_left",
    "retries_left",
)
"""Hash fields of a job that make RQ run, call or repeat something besides the function."""


class JobQueue:
    """The farm's queue on a byte connection."""

    def __init__(self, redis_bytes: Redis, name: str) -> None:
        self._redis = redis_bytes
        self.rq = Queue(name, connection=redis_bytes, serializer=JSONSerializer)

    def named(self, name: str) -> JobQueue:
        """The queue of that name beside this one; '' is this one."""
        return self if name in ("", self.rq.name) else JobQueue(self._redis, name)

    def enqueue(self, spec: EpisodeSpec, attempt: int | None = None) -> None:
        """Put the episode's job on the queue, for the attempt that its row is at; a duplicate is success.

        Reserved ones go to the front. One that stepped back does not: its reservation is over, and in front it would
        circle before all others.
        """
        at, left_at = cast(
            "list[bytes | None]", self._redis.hmget(Keys.episode(spec.episode_id), ["attempt", "left_at"])
        )
        attempt = attempt or int(at or 1)
        budgets = spec.budgets
        job = Job.create(
            JOB_FUNCTION,
            args=[spec.model_dump(mode="json"), attempt],
            id=job_id(spec.episode_id, attempt),
            origin=self.rq.name,
            connection=self._redis,
            serializer=JSONSerializer,
            timeout=int(
                max(budgets.admission_seconds, budgets.reserved_admission_seconds)
                + budgets.deadline_seconds
                + budgets.cleanup_seconds
                + _CLEANUP_MARGIN_SECONDS
            ),
            result_ttl=KEEP_SECONDS,
            failure_ttl=KEEP_SECONDS,
            description=f"episode {spec.episode_id} of {spec.task.id}",
        )
        try:
            self.rq.enqueue_job(job, unique=True, at_front=spec.reservation_id is not None and left_at is None)
        except DuplicateJobError:
            return

    def waiting(self) -> set[str]:
        """Ids of the jobs that wait in the queue."""
        return set(self.rq.get_job_ids())

    def depth(self) -> int:
        """How many jobs wait."""
        return int(self.rq.count)

    def depths(self) -> dict[str, int]:
        """How many jobs wait, by queue: this one and every other of this database that ever had one."""
        queues = self.siblings()
        pipeline = self._redis.pipeline(transaction=False)
        for queue in queues:
            pipeline.llen(queue.rq.key)
        return dict(zip((queue.rq.name for queue in queues), pipeline.execute(), strict=True))

    def siblings(self) -> list[JobQueue]:
        """This queue and every other of this database that ever had a job, by name."""
        known = {queue.name for queue in Queue.all(connection=self._redis, serializer=JSONSerializer)}
        return [self.named(name) for name in sorted(known | {self.rq.name})]

    def taken(self) -> set[str]:
        """Ids of the jobs that workers have taken and not noted as ended, by what RQ keeps; the dead are among them."""
        started = self.rq.started_job_registry.get_job_and_execution_ids(cleanup=False)  # cleaning up would fail jobs
        return {job for job, _ in started} | set(self.rq.intermediate_queue.get_job_ids())

    def withdraw(self, job: str, *, lost: bool = False) -> None:
        """Take a job off the queue. One that somebody has popped keeps its envelope, unless it is `lost` with him.

        Not for ever: he may have died with it, and nobody else would tidy it up.
        """
        if lost:
            self._forget_taking(job)
        if self.rq.remove(job) or lost:
            self._redis.delete(Job.key_for(job))
        else:
            self._redis.expire(Job.key_for(job), KEEP_SECONDS)

    def forget(self, job: str) -> None:
        """Drop what RQ keeps of a job that somebody took and will not end; RQ itself would look after ten minutes.

        The envelope of one that RQ has noted as ended stays until it expires. A worker that lives after all finds
        nothing and writes nothing that stays.
        """
        self._forget_taking(job)
        self.rq.remove(job)
        if self._redis.ttl(Job.key_for(job)) < 0:
            self._redis.delete(Job.key_for(job))

    def _forget_taking(self, job: str) -> None:
        """Only the orchestrator's Redis user may: these keys are the workers'."""
        registry = self.rq.started_job_registry
        pipeline = self._redis.pipeline(transaction=False)
        for name, execution in registry.get_job_and_execution_ids(cleanup=False):
            if name == job:
                pipeline.zrem(registry.key, f"{job}:{execution}")
                pipeline.delete(Execution(execution, job, self._redis).key)
        pipeline.delete(ExecutionRegistry(job, self._redis).key)
        pipeline.lrem(self.rq.intermediate_queue_key, 0, job)
        pipeline.execute()


def refusal(fields: dict[str, Any], func_name: str | None) -> str | None:
    """Why a worker must not run a job with these hash fields, or None when it is one of ours."""
    if func_name != JOB_FUNCTION:
        return f"function {func_name!r} is not {JOB_FUNCTION!r}"
    for name in EXECUTABLE_EXTRAS:
        if fields.get(name):
            return f"it carries {name}, which this farm never uses"
    return None
