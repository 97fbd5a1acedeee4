"""A farm with nothing behind it: the orchestrator's parts over a Redis, specs, leases, receipts, and a tiny slot."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from orchestrator.connection import client
from orchestrator.errors import EpisodeAborted
from orchestrator.farm import Farm, open_farm
from orchestrator.keys import Keys
from orchestrator.limiter import Admission
from orchestrator.mailbox import RESET_NUMBER, Action, Mailbox, Result
from orchestrator.presence import WorkerRow
from orchestrator.provider import CreateRequest
from orchestrator.records import Allocation, EpisodeSpec, Receipt, Script
from orchestrator.rows import Lease
from orchestrator.settings import Settings
from orchestrator.tasks import load_builtin
from orchestrator.vocabulary import Drive, EpisodeState, Outcome, Role, allocation_id, job_id

TASK = load_builtin("weekly-sales")


def farm_settings(redis_url: str, **changes: Any) -> Settings:
    """Settings for a farm on this Redis; nothing is read from the surroundings."""
    return Settings(_env_file=None, **{"redis_url": redis_url, **changes})  # type: ignore[call-arg]


@contextmanager
def opened_farm(redis_url: str, **changes: Any) -> Iterator[Farm]:
    """A farm on this Redis; its connections end with the block."""
    with farm_of(farm_settings(redis_url, **changes)) as farm:
        yield farm


@contextmanager
def farm_of(settings: Settings) -> Iterator[Farm]:
    """A farm of these settings; its connections end with the block."""
    farm = open_farm(settings)
    try:
        yield farm
    finally:
        farm.redis.close()
        farm.queue.rq.connection.close()


def a_spec(episode_id: str | None = None, **changes: Any) -> EpisodeSpec:
    """An autonomous episode of the built-in task."""
    given: dict[str, Any] = {
        "episode_id": f"e-{uuid.uuid4().hex[:12]}" if episode_id is None else episode_id,
        "run_id": "run-test",
        "task": TASK,
        "template": "base",
        "drive": Drive.AUTONOMOUS,
        "policy": Script(commands=("true",)),
    }
    return EpisodeSpec(**{**given, **changes})


def a_receipt(spec: EpisodeSpec, outcome: Outcome = Outcome.CANCELLED, **changes: Any) -> Receipt:
    """The receipt of an episode that ended with `outcome`."""
    given: dict[str, Any] = {
        "episode_id": spec.episode_id,
        "attempt": 1,
        "run_id": spec.run_id,
        "task_id": spec.task.id,
        "task_digest": spec.task.digest(),
        "template": spec.template,
        "drive": spec.drive,
        "outcome": outcome,
        "reward": outcome.score,
        "queued_at": 1.0,
        "finished_at": 2.0,
    }
    return Receipt(**{**given, **changes})


def a_request(
    spec: EpisodeSpec, role: Role = Role.POLICY, *, farm_tag: str = "tag-of-ours", attempt: int = 1
) -> CreateRequest:
    """The create request of an episode's attempt, tagged as the executor tags it."""
    name = allocation_id(spec.episode_id, attempt, role)
    return CreateRequest(
        allocation_id=name,
        template=spec.template,
        lifetime_seconds=300,
        allow_internet_access=False,
        metadata={"farm": farm_tag, "episode": spec.episode_id, "allocation": name, "role": str(role)},
    )


def leased(farm: Farm, spec: EpisodeSpec | None = None, *, lease_seconds: float = 30) -> tuple[EpisodeSpec, Lease]:
    """An open episode and the lease of a slot that took it, and its job off the queue."""
    spec = spec or a_spec()
    farm.ledger.open(spec)
    row = farm.ledger.row(spec.episode_id)
    assert row is not None
    owner = f"owner-{uuid.uuid4().hex[:8]}"
    lease = farm.ledger.take(spec.episode_id, row.attempt, owner, lease_seconds=lease_seconds)
    assert lease is not None
    farm.queue.forget(job_id(spec.episode_id, row.attempt))
    return spec, lease


def intended(
    farm: Farm, spec: EpisodeSpec, lease: Lease, role: Role = Role.POLICY, *, longest_seconds: int | None = None
) -> Allocation:
    """An allocation whose intent stands in the ledger; it can live as long as the episode's budgets allow."""
    request = a_request(spec, role)
    longest = longest_seconds or spec.budgets.longest_seconds(role)
    farm.ledger.allocations.intend(spec.episode_id, role, request, lease.token, longest_seconds=longest)
    return stored(farm, request.allocation_id)


def stored(farm: Farm, name: str) -> Allocation:
    """An allocation as it stands; fails when there is none."""
    row = farm.ledger.allocations.get(name)
    assert row is not None, f"no allocation {name}"
    return row


def run_episode(redis: Redis, episode_id: str) -> None:
    """The least of a running episode's row that the limiter asks for, unless there is more; forgotten by itself."""
    if redis.hsetnx(Keys.episode(episode_id), "state", EpisodeState.RUNNING):
        redis.expire(Keys.episode(episode_id), 600)


def admit(farm: Farm, episode_id: str, *, reservation_id: str | None = None, wait_seconds: float = 20) -> Admission:
    """Ask for a permit, with nothing that could interrupt the wait."""
    run_episode(farm.redis, episode_id)
    return farm.limiter.admit(episode_id, reservation_id=reservation_id, wait_seconds=wait_seconds, check=lambda: None)


def ended_unresolved(farm: Farm) -> tuple[Allocation, Lease]:
    """The policy sandbox of an episode that ended without the deletion having been answered."""
    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    row = intended(farm, spec, lease, Role.POLICY)
    farm.ledger.allocations.created(row, "sandbox-1", lease.token, creating_ms=10)
    row = farm.ledger.allocations.sized(row, vcpus=2, memory_mb=512).row
    farm.ledger.allocations.unresolved(row, lease.token, "the deletion was not answered")
    farm.ledger.commit(a_receipt(spec, Outcome.CLEANUP_UNRESOLVED, allocations=(row.allocation_id,)), lease.token)
    return row, lease


def beat_slots(farm: Farm, count: int) -> None:
    """Let `count` slots be alive for one lease time."""
    row = WorkerRow("worker-test", "here", 1, "running", count, "http://127.0.0.1:1")
    farm.presence.beat_worker(row, [f"slot-{number}" for number in range(count)])


def expire(redis: Redis, episode_id: str) -> None:
    """Let an episode's lease have run out long ago."""
    assert redis.zadd(Keys.LEASES, {episode_id: 1}, xx=True, ch=True) == 1


class TinySlot:
    """A slot without sandboxes, on a thread: lease, permit, mailbox and receipt as a worker's slot does them.

    A command is echoed. `lose` loses the sandbox, `fail` makes the submission a wrong answer.
    """

    def __init__(self, settings: Settings, slot_id: str = "slot-tiny") -> None:
        self.farm = open_farm(settings)
        self.commands: list[str] = []
        self._settings = settings
        self._slot_id = slot_id
        self._bytes = client(settings, text=False)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name=slot_id, daemon=True)
        self._failure: BaseException | None = None
        self._verdict = Outcome.SOLVED

    def __enter__(self) -> TinySlot:
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the slot has not ended"
        self.farm.presence.remove_worker(self._slot_id, [self._slot_id])
        for connection in (self.farm.redis, self.farm.queue.rq.connection, self._bytes):
            connection.close()
        if self._failure is not None:
            raise self._failure

    def _beat(self) -> None:
        self.farm.presence.beat_worker(WorkerRow(self._slot_id, "here", 1, "running", 1, "-"), [self._slot_id])

    def _main(self) -> None:
        try:
            while not self._stop.is_set():
                self._beat()
                popped = cast("tuple[bytes, bytes] | None", self._bytes.blpop([self.farm.queue.rq.key], timeout=0.1))
                if popped is not None:
                    self._run(popped[1].decode())
                    self.farm.queue.forget(popped[1].decode())
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self._failure = error

    def _run(self, job_id: str) -> None:
        job = Job.fetch(job_id, connection=self._bytes, serializer=JSONSerializer)
        spec, attempt = EpisodeSpec.model_validate(job.args[0]), job.args[1]
        lease = self.farm.ledger.take(spec.episode_id, attempt, f"{self._slot_id}-{job_id}", lease_seconds=30)
        if lease is None:
            return
        check = self._check(spec)
        try:
            admission = self.farm.limiter.admit(
                spec.episode_id, reservation_id=spec.reservation_id, wait_seconds=20, check=check
            )
            if admission is Admission.STEP_BACK:
                assert self.farm.ledger.defer(lease)
                self.farm.queue.enqueue(spec, attempt + 1)
            elif spec.drive is Drive.AUTONOMOUS:
                self._commit(spec, lease, Outcome.SOLVED)
            else:
                self._drive(spec, lease, check)
        except EpisodeAborted as error:
            self._commit(spec, lease, error.outcome, error.detail)

    def _check(self, spec: EpisodeSpec) -> Callable[[], None]:
        def check() -> None:
            if self._stop.is_set():
                raise EpisodeAborted(Outcome.CANCELLED, "the slot was told to stop")
            if self.farm.ledger.cancelled(spec.episode_id):
                raise EpisodeAborted(Outcome.CANCELLED, "cancelled")
            if spec.trainer_id and not self.farm.presence.trainer_alive(spec.trainer_id):
                raise EpisodeAborted(Outcome.TRAINER_LOST, "no heartbeat")

        return check

    def _drive(self, spec: EpisodeSpec, lease: Lease, check: Callable[[], None]) -> None:
        mailbox = Mailbox(self.farm.redis, spec.episode_id)
        number = RESET_NUMBER
        try:
            mailbox.finish(number, lease.token, Result(text="ready"))
            ended = False
            while not ended:
                check()
                if (action := mailbox.take(number + 1, lease.token, 0.2)) is not None:
                    number += 1
                    result = self._perform(spec, lease, action)
                    ended = result.outcome is not None
                    mailbox.finish(number, lease.token, result)
        except EpisodeAborted as error:
            receipt = self._commit(spec, lease, error.outcome, error.detail)
            mailbox.finish(number, lease.token, Result(outcome=receipt.outcome, detail=receipt.detail))

    def _perform(self, spec: EpisodeSpec, lease: Lease, action: Action) -> Result:
        if action.name == "terminal":
            self.commands.append(action.command or "")
            if action.command == "lose":
                raise EpisodeAborted(Outcome.SANDBOX_LOST, "the sandbox is gone")
            if action.command == "fail":
                self._verdict = Outcome.WRONG_ANSWER
            return Result(text=f"ran {action.command}", exit_code=0)
        outcome = {"submit": self._verdict, "reward": Outcome.NOT_SUBMITTED, "close": Outcome.CANCELLED}[action.name]
        receipt = self._commit(spec, lease, outcome)
        return Result(outcome=receipt.outcome, reward=receipt.reward)

    def _commit(self, spec: EpisodeSpec, lease: Lease, outcome: Outcome, detail: str | None = None) -> Receipt:
        receipt = a_receipt(spec, outcome, attempt=lease.attempt, detail=detail)
        self.farm.ledger.commit(receipt, lease.token)
        return receipt
