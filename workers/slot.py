"""One of a worker's two places: an ordinary forking RQ worker that runs nothing but episodes.

What always holds: a job that could make RQ execute anything else is failed, unrun, judged as it was loaded by whatever
process would run it; a horse dies with its slot; a second stop signal closes the running episode in order instead of
killing it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from redis.client import Pipeline
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.exceptions import StopRequested
from rq.executions import Execution
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.worker import WorkerStatus
from rq.worker_registration import register

from orchestrator.connection import BLOCK_SECONDS, client, make_impatient
from orchestrator.queue import EXECUTABLE_EXTRAS, KEEP_SECONDS, refusal
from orchestrator.settings import Settings
from workers import jobs
from workers.parentage import die_with_parent
from workers.spare import Order, SpareHorse

logger = logging.getLogger(__name__)

_RQ_MARGIN_SECONDS = 15
"""RQ blocks for its worker_ttl less this."""


class SlotWorker(Worker):
    """RQ's worker, narrowed to one function."""

    max_connection_wait_time = BLOCK_SECONDS
    """RQ's is a minute: so long a slot would take no job after Redis is back, and its heartbeats say that it does."""
    _slot_pid = 0
    _spare: SpareHorse | None = None

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Refuse what is not an episode, before anything of it is resolved; run the rest in a fork."""
        reason = refuse(job)
        if reason is None:
            self._slot_pid = os.getpid()
            super().execute_job(job, queue)
            return
        self.log.error("job %s refused: %s", job.id, reason)
        blank = Job(job.id, connection=self.connection, serializer=JSONSerializer)
        for name in EXECUTABLE_EXTRAS:  # failing a job would retry it, call back, send webhooks
            attribute = _attribute(blank, name)
            setattr(job, attribute, getattr(blank, attribute))
        execution = self.prepare_execution(job)
        self.handle_job_failure(job, queue, exc_string=f"refused: {reason}", execution=execution)

    def handle_job_failure(
        self,
        job: Job,
        queue: Queue,
        started_job_registry: StartedJobRegistry | None = None,
        exc_string: str = "",
        execution: Execution | None = None,
    ) -> None:
        """Let what RQ keeps of it expire: of a job that names no time, unlike ours, a result stays for ever."""
        job.failure_ttl = KEEP_SECONDS
        super().handle_job_failure(job, queue, started_job_registry, exc_string, execution)

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """Log what a job raised, with its traceback. RQ's own adds the arguments: of ours, what a task keeps from its
        policy and the environment that it gives its sandboxes, which may be secret. There are no other handlers.
        """
        self.log.error("job %s: exception raised while executing", job.id, exc_info=exc_info)

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        """Have a spare horse ready while waiting for a job."""
        if self._spare is None:
            self._slot_pid = os.getpid()
            self._spare = SpareHorse(self._warm, self._run_order)
        return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        """Give the job to the spare horse; fork one as RQ does when there is none."""
        spare, self._spare = self._spare, None
        execution = self.execution
        if spare is not None and execution is not None and spare.start(Order(job.id, execution.id)):
            self._horse_pid = spare.pid
            return
        super().fork_work_horse(job, queue)

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        """Tie the fresh horse to this slot before it does anything, and look at what it has loaded itself."""
        die_with_parent(self._slot_pid)
        reason = refuse(job)
        if reason is not None:  # its row was changed after the slot had read it
            self.log.error("job %s refused: %s", job.id, reason)
            os._exit(1)  # how RQ's horse says that a job failed
        super().main_work_horse(job, queue)

    def teardown(self) -> None:
        """Say goodbye once: when Redis has gone too, RQ's own rows expire by themselves."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.dismiss()
        make_impatient(self.connection)
        try:
            super().teardown()  # type: ignore[no-untyped-call]
        except RedisError as error:
            self.log.warning("departure not noted: %s", error)

    def _warm(self) -> None:
        self.setup_work_horse_signals()  # type: ignore[no-untyped-call]
        try:
            self.get_redis_server_version()  # type: ignore[no-untyped-call] # remembered; it also connects
        except RedisError as error:
            self.log.warning("spare horse not warmed up: %s", error)
            return
        jobs.warm_up()

    def _run_order(self, order: Order) -> None:
        """In the spare: fetch what the slot has in memory, as RQ's own spawned horses do, and run it."""
        job = Job.fetch(order.job_id, connection=self.connection, serializer=JSONSerializer)
        execution = Execution.fetch(order.execution_id, job.id, connection=self.connection)
        self.executions[execution.id] = execution
        job.redis_server_version = self.get_redis_server_version()  # type: ignore[no-untyped-call]
        self.main_work_horse(job, self.queues[0])

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """The first stop signal. RQ raises in the handler, and what it interrupts may swallow that: a log handler does.

        So it is noted as well, and every heartbeat of an idle slot looks.
        """
        self._stop_requested = True
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def heartbeat(self, timeout: int | None = None, pipeline: Pipeline | None = None) -> None:
        """RQ's; an idle slot's alone, not one that is part of taking a job, is also its look whether it has to stop."""
        if self._stop_requested and pipeline is None and self.get_state() != WorkerStatus.BUSY:
            raise StopRequested
        if pipeline is not None:
            super().heartbeat(timeout, pipeline)
            return
        with self.connection.pipeline(transaction=False) as together:  # one round trip, not three, before each job
            super().heartbeat(timeout, together)
            if self.birth_date is not None:  # its row expires while Redis is away, and RQ writes it at birth only
                together.hset(self.key, mapping={**self.serialize(), "state": self.get_state()})
                register(self, together)
            together.execute()

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:
        """A second stop signal: the horse ends its episode at the next boundary, cleaned up and with a receipt."""
        if self.horse_pid:
            with suppress(ProcessLookupError):
                os.kill(self.horse_pid, signal.SIGTERM)
        else:
            super().request_force_stop(signum, frame)


def refuse(job: Job) -> str | None:
    """Why this job must not run, by what RQ holds of it in this process; nothing in it is resolved."""
    try:
        func_name = job.func_name
    except Exception as error:  # noqa: BLE001 - the room's border to hostile data: whatever it is, it is refused
        return f"its data cannot be read: {error}"
    return refusal({name: getattr(job, _attribute(job, name)) for name in EXECUTABLE_EXTRAS}, func_name)


def _attribute(job: Job, name: str) -> str:
    """Where RQ keeps a field of a job's hash: some behind a property that would resolve it."""
    private = f"_{name}"
    return private if hasattr(job, private) else name


def slot_worker(settings: Settings, slot_id: str) -> SlotWorker:
    """The slot's RQ worker, on a connection of its own. It asks for a job again every BLOCK_SECONDS.

    RQ alone would wait for one for seven minutes, and take as long to notice a Redis that is silently gone; what Redis
    hands to such a connection is lost.
    """
    connection = client(settings, text=False)
    return SlotWorker(
        [Queue(settings.queue, connection=connection, serializer=JSONSerializer)],
        name=slot_id,
        connection=connection,
        serializer=JSONSerializer,
        job_monitoring_interval=5,
        log_job_description=False,  # RQ makes one of the arguments for whoever gives none
        worker_ttl=BLOCK_SECONDS + _RQ_MARGIN_SECONDS,
    )


def free_name(settings: Settings, names: Iterable[str]) -> str:
    """The first of these under which RQ lists no living worker.

    A killed worker's stay listed for a minute, and RQ refuses a second of the name: one started again at once, under
    the same id, would otherwise see its slots die of that.
    """
    prefix = SlotWorker.redis_worker_namespace_prefix
    with client(settings, text=False) as connection:
        return next(
            name for name in names if not connection.exists(prefix + name) or connection.hexists(prefix + name, "death")
        )


def run_slot(context: jobs.SlotContext) -> None:
    """The slot process's main: work until told to stop. Called in a fresh fork of the supervisor."""
    jobs.bind(context)
    if context.settings.redis_url is None:
        raise RuntimeError("a slot needs a Redis URL")
    worker = slot_worker(context.settings, context.slot_id)
    gc.collect()
    gc.freeze()  # what a horse's collector does not look at, it does not copy
    worker.work(logging_level=context.settings.log_level.upper(), with_scheduler=False)
