"""The RQ envelope of an episode: how a job is made, put on the queue, and which jobs a worker refuses to run.

What always holds: a job names exactly one function, by its whole name, has JSON arguments and nothing else that RQ
could execute; it is never retried and never repeated. Waiting is done on receipts and mailboxes, never on RQ results.
"""

from __future__ import annotations

from typing import Any

from redis import Redis
from rq import Queue
from rq.exceptions import DuplicateJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import job_id

JOB_FUNCTION = "workers.jobs.run_episode"
"""The one function that a worker runs; compared whole, since RQ resolves any dotted name it is given."""

_KEEP_SECONDS = 600
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

    def enqueue(self, spec: EpisodeSpec, attempt: int = 1) -> None:
        """Put the episode's job on the queue; reserved ones go to the front (one that stepped back does not:
        its reservation is over, and in front it would circle before all others); a duplicate is success.
        """
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
            result_ttl=_KEEP_SECONDS,
            failure_ttl=_KEEP_SECONDS,
            description=f"episode {spec.episode_id} of {spec.task.id}",
        )
        try:
            self.rq.enqueue_job(job, unique=True, at_front=spec.reservation_id is not None and attempt == 1)
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
        known = {queue.name for queue in Queue.all(connection=self._redis, serializer=JSONSerializer)}
        names = sorted(known | {self.rq.name})
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.llen(self.named(name).rq.key)
        return dict(zip(names, pipeline.execute(), strict=True))

    def withdraw(self, job: str, *, lost: bool = False) -> None:
        """Take a job off the queue. One that somebody has popped keeps its envelope, unless it is `lost` with him.

        Not for ever: he may have died with it, and nobody else would tidy it up.
        """
        if self.rq.remove(job) or lost:
            self._redis.delete(Job.key_for(job))
        else:
            self._redis.expire(Job.key_for(job), _KEEP_SECONDS)


def refusal(fields: dict[str, Any], func_name: str | None) -> str | None:
    """Why a worker must not run a job with these hash fields, or None when it is one of ours."""
    if func_name != JOB_FUNCTION:
        return f"function {func_name!r} is not {JOB_FUNCTION!r}"
    for name in EXECUTABLE_EXTRAS:
        if fields.get(name):
            return f"it carries {name}, which this farm never uses"
    return None
