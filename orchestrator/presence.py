"""Who is alive: slots and workers by their supervisor's heartbeat, trainers by their own. All of it expires.

What always holds: who has died is forgotten within its time, also when Redis's clock steps back meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import cast

from redis import Redis

from orchestrator.keys import Keys
from orchestrator.scripts import Scripts

_LOOK_SECONDS = 0.1


def slot_name(worker_id: str, number: int, start: int = 1) -> str:
    """The name of a worker's slot; each start of it has one of its own, for RQ refuses a name that still lives.

    Heartbeats name the slot, whichever start of it lives: as its first.
    """
    return f"{worker_id}-{number}" + (f".{start}" if start > 1 else "")


def worker_of(slot: str) -> str:
    """The worker that a slot of this name belongs to."""
    return slot.rpartition("-")[0]


@dataclass(frozen=True)
class WorkerRow:
    """A worker as its supervisor last described it."""

    worker_id: str
    host: str
    pid: int
    state: str
    slots: int
    terminus_url: str
    queue: str = ""
    """Whose jobs it takes; '' where an older version does not say."""


class Presence:
    """Writes and reads heartbeats."""

    def __init__(self, redis: Redis, *, slot_seconds: float, trainer_seconds: float) -> None:
        self._redis = redis
        self._scripts = Scripts(redis)
        self._slot_ms = int(slot_seconds * 1000)
        self._worker_ms = 3 * self._slot_ms
        self._trainer_ms = int(trainer_seconds * 1000)

    def beat_worker(self, row: WorkerRow, live_slots: list[str]) -> None:
        """Say that this worker and these of its slots are alive, and no other slot of it."""
        lives = [self._slot_ms, self._worker_ms]
        self._scripts.run("beat", [Keys.SLOTS, Keys.WORKERS], [*lives, row.worker_id, *live_slots])
        key = Keys.worker(row.worker_id)
        pipeline = self._redis.pipeline()
        pipeline.hset(key, mapping={name: str(value) for name, value in asdict(row).items()})
        pipeline.pexpire(key, self._worker_ms)
        pipeline.execute()

    def remove_worker(self, worker_id: str, slots: list[str]) -> None:
        """Say that this worker has left."""
        self._redis.delete(Keys.worker(worker_id))
        self._redis.zrem(Keys.WORKERS, worker_id)
        if slots:
            self._redis.zrem(Keys.SLOTS, *slots)

    def beats(self, worker_id: str, *, within_seconds: float) -> bool:
        """Whether a worker of this id says within that time that it is alive; returns as soon as it has, or has gone.

        Nothing else tells: a killed one's row is there for a while, and its pid may be another's by now.
        """
        key, ends = Keys.worker(worker_id), time.monotonic() + within_seconds
        left = int(self._redis.pttl(key))
        while left > 0 and time.monotonic() < ends:
            time.sleep(_LOOK_SECONDS)
            before, left = left, int(self._redis.pttl(key))
            if left > before:
                return True
        return False

    def drop_dead_slots(self) -> int:
        """Forget the slots that have not said lately that they are alive; how many there were."""
        return int(self._scripts.run("drop_slots", [Keys.SLOTS], [self._slot_ms]))

    def workers(self) -> list[WorkerRow]:
        """Every worker that is alive, also one that drains and has no live slot."""
        return self._rows([Keys.worker(name) for name in cast("list[str]", self._redis.zrange(Keys.WORKERS, 0, -1))])

    def workers_of(self, slots: Iterable[str]) -> list[WorkerRow]:
        """Those that these slots belong to."""
        return self._rows([Keys.worker(name) for name in {worker_of(slot) for slot in slots}])

    def _rows(self, keys: Sequence[str]) -> list[WorkerRow]:
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.hgetall(key)
            pipeline.pttl(key)
        answers = pipeline.execute() if keys else []
        found = cast("list[dict[str, str]]", answers[::2])
        for key, left in zip(keys, answers[1::2], strict=True):
            if left > self._worker_ms:  # its last beat was before the clock stepped back (scripts/_clock.lua)
                self._redis.pexpire(key, self._worker_ms)
        rows = [WorkerRow(**{**raw, "pid": int(raw["pid"]), "slots": int(raw["slots"])}) for raw in found if raw]  # type: ignore[arg-type]
        return sorted(rows, key=lambda row: row.worker_id)

    def live_slots(self) -> list[str]:
        """Names of the live slots."""
        seconds, micros = self._redis.time()
        return cast("list[str]", self._redis.zrangebyscore(Keys.SLOTS, seconds * 1000 + micros // 1000, "+inf"))

    def taking(self, host: str) -> list[str]:
        """Ids of the workers of this host that have a live slot, and so take episodes."""
        return [row.worker_id for row in self.workers_of(self.live_slots()) if row.host == host]

    def beat_trainer(self, trainer_id: str) -> None:
        """Say that this trainer process is alive."""
        self._redis.set(Keys.trainer(trainer_id), self._trainer_ms, px=self._trainer_ms)

    def claim_run(self, run_id: str, trainer_id: str) -> bool:
        """Whether the trainer alone drives the run from now on, for trainer_lost_seconds unless it claims it again."""
        return bool(self._scripts.run("hold", [Keys.driver(run_id)], [trainer_id, self._trainer_ms]))

    def claim_left_seconds(self, run_id: str) -> float:
        """How long the last claim of the run still counts; each renewal makes it longer, 0 says that there is none."""
        return int(self._scripts.run("read_hold", [Keys.driver(run_id)], [])[1]) / 1000

    def release_run(self, run_id: str, trainer_id: str) -> None:
        """Give the trainer's claim up; changes nothing when it has none."""
        self._scripts.run("let_go", [Keys.driver(run_id)], [trainer_id])

    def trainer_alive(self, trainer_id: str) -> bool:
        """Whether the trainer has said so within trainer_lost_seconds."""
        return trainer_id not in self.lost_trainers([trainer_id])

    def lost_trainers(self, trainers: Iterable[str], *, only_look: bool = False) -> frozenset[str]:
        """Those of these trainers that have sent no heartbeat for trainer_lost_seconds.

        Unless it shall `only_look`, heartbeats of before a step back of Redis's clock are given their time, no more.
        """
        names = sorted(trainers)
        keys = [Keys.trainer(name) for name in names]
        answers = self._scripts.run("read_heartbeats", keys, [int(not only_look)]) if names else []
        return frozenset(name for name, alive in zip(names, answers, strict=True) if not alive)
