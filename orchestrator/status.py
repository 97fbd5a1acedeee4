"""The farm at a glance, read from Redis: capacity, workers, queue, open episodes, what is unresolved."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from orchestrator.budget import UNTOUCHED, Balance
from orchestrator.cost import usd_text
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.leadership import leader
from orchestrator.limiter import Capacity
from orchestrator.presence import WorkerRow
from orchestrator.records import Allocation
from orchestrator.spending import burn_picousd_per_hour
from orchestrator.unresolved import ORPHANS_DELETED, Item

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
    reconciled_at: float | None = None
    """When reconcilers ended a whole round last, in unix seconds of Redis."""
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
            "reconciled_at": self.reconciled_at,
            "orphans_deleted": self.orphans_deleted,
            "budget": self.budget.as_json(),
            "burn_usd_per_hour": usd_text(self.burn_picousd_per_hour),
        }


def read_status(farm: Farm) -> Status:
    """Read the farm once."""
    ledger = farm.ledger
    counters = cast("dict[str, str]", farm.redis.hgetall(Keys.COUNTERS))
    unsettled = ledger.allocations.unsettled()
    unresolved = tuple(row for row in unsettled if row.state.stuck)
    shown = {row.allocation_id for row in unresolved}
    return Status(
        capacity=farm.limiter.capacity(),
        workers=tuple(farm.presence.workers()),
        queued_jobs=sum(farm.queue.depths().values()),
        open_episodes=ledger.count_open(),
        running_episodes=len(ledger.lease_ends()),
        outcomes={
            name.removeprefix(_COUNTED): int(count)
            for name, count in sorted(counters.items())
            if name.startswith(_COUNTED)
        },
        unresolved=unresolved,
        not_settled=tuple(item for item in ledger.unresolved.items() if item.id not in shown),
        leader=leader(farm.redis),
        reconciled_at=ledger.unresolved.reconciled_at(),
        orphans_deleted=int(counters.get(ORPHANS_DELETED, 0)),
        budget=farm.budget.read(),
        burn_picousd_per_hour=burn_picousd_per_hour(ledger.allocations.running()),
    )
