"""The farm at a glance, read from Redis: capacity, workers, queue, open episodes, what is unresolved."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from redis import Redis

from orchestrator.budget import UNTOUCHED, Balance, Budget
from orchestrator.cost import usd_text
from orchestrator.keys import Keys
from orchestrator.leadership import leader
from orchestrator.ledger import Ledger
from orchestrator.limiter import Capacity, Limiter
from orchestrator.presence import Presence, WorkerRow
from orchestrator.queue import JobQueue
from orchestrator.records import Allocation
from orchestrator.spending import burn_picousd_per_hour
from orchestrator.unresolved import ORPHANS_DELETED, Item
from orchestrator.vocabulary import AllocationState

_COUNTED = "episodes:"


@dataclass(frozen=True)
class Status:
    """One reading."""

    capacity: Capacity
    workers: tuple[WorkerRow, ...]
    queued_jobs: int
    open_episodes: int
    running_episodes: int
    outcomes: dict[str, int]
    unresolved: tuple[Allocation, ...]
    not_settled: tuple[Item, ...] = ()
    """What the reconcilers could not do, besides those sandboxes: orphans, rows, a provider that does not answer."""
    leader: str | None = None
    """The reconciler that leads; None when nobody does, and killed workers' episodes stay open."""
    orphans_deleted: int = 0
    budget: Balance = UNTOUCHED
    """The farm's."""
    burn_picousd_per_hour: int = 0
    """What the sandboxes that run now cost."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        capacity = {**asdict(self.capacity), "free": self.capacity.free}
        return {
            "capacity": capacity,
            "workers": [asdict(row) for row in self.workers],
            "queued_jobs": self.queued_jobs,
            "open_episodes": self.open_episodes,
            "running_episodes": self.running_episodes,
            "outcomes": self.outcomes,
            "unresolved": [row.model_dump(mode="json") for row in self.unresolved],
            "not_settled": [item.as_json() for item in self.not_settled],
            "leader": self.leader,
            "orphans_deleted": self.orphans_deleted,
            "budget": self.budget.as_json(),
            "burn_usd_per_hour": usd_text(self.burn_picousd_per_hour),
        }


def read_status(redis: Redis, ledger: Ledger, limiter: Limiter, presence: Presence, queue: JobQueue) -> Status:
    """Read the farm once."""
    counters = cast("dict[str, str]", redis.hgetall(Keys.COUNTERS))
    stuck = (AllocationState.UNRESOLVED, AllocationState.UNKNOWN)
    unsettled = ledger.allocations.unsettled()
    unresolved = tuple(row for row in unsettled if row.state in stuck)
    shown = {row.allocation_id for row in unresolved}
    return Status(
        capacity=limiter.capacity(),
        workers=tuple(presence.workers()),
        queued_jobs=queue.depth(),
        open_episodes=len(ledger.open_episodes()),
        running_episodes=len(ledger.lease_ends()),
        outcomes={
            name.removeprefix(_COUNTED): int(count)
            for name, count in sorted(counters.items())
            if name.startswith(_COUNTED)
        },
        unresolved=unresolved,
        not_settled=tuple(item for item in ledger.unresolved.items() if item.id not in shown),
        leader=leader(redis),
        orphans_deleted=int(counters.get(ORPHANS_DELETED, 0)),
        budget=Budget(redis).read(),
        burn_picousd_per_hour=burn_picousd_per_hour(unsettled, ledger.allocations.rates, ledger.now()),
    )
