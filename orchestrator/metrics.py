"""The farm in Prometheus's terms: one reading of Redis, and the metric families that a reading makes.

What always holds: nothing is kept between scrapes, so whoever is asked says the same, restarts reset nothing, and a
label set that is gone is gone; counters and histograms are farm:counters, which the receipts and the settlements of
sandboxes write themselves (counts.py); no label carries an id. Counting a farm is a handful of round trips, however
many receipts there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from orchestrator.allocations import Running
from orchestrator.budget import Balance
from orchestrator.cost import usd
from orchestrator.counts import (
    COST,
    INFINITE,
    PHASE,
    RESULTS,
    REWARD,
    TOOL_CALL,
    TOOLS,
    Distribution,
    Histogram,
    distribution,
)
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import LimiterReading
from orchestrator.presence import worker_of
from orchestrator.spending import burn_picousd_per_hour
from orchestrator.unresolved import ORPHANS_DELETED, Kind
from orchestrator.vocabulary import AllocationState, Outcome, Phase, Role

_UNSETTLED = tuple(state for state in AllocationState if not state.settled)
_CLEANUPS = (*(state for state in AllocationState if state.settled), AllocationState.UNRESOLVED)


@dataclass(frozen=True)
class FarmReading:
    """What one scrape found."""

    counters: Mapping[str, str]
    running: tuple[Running, ...]
    limiter: LimiterReading
    queues: Mapping[str, int]
    """How many episodes wait, by queue."""
    slots: tuple[str, ...]
    """Names of the live ones (presence.slot_name)."""
    leased: int
    budget: Balance
    """The farm's."""
    not_settled: Mapping[Kind, int]
    """What reconcilers could not settle."""
    reconciled_at: float | None
    """When reconcilers ended a whole round last, in unix seconds."""

    @property
    def queued(self) -> int:
        """How many episodes wait in all queues."""
        return sum(self.queues.values())


def read(farm: Farm) -> FarmReading:
    """Look at the farm once; raises RedisError."""
    return FarmReading(
        counters=cast("dict[str, str]", farm.redis.hgetall(Keys.COUNTERS)),
        running=tuple(farm.ledger.allocations.running()),
        limiter=farm.limiter.read(),
        queues=_in_use(farm),
        slots=tuple(farm.presence.live_slots()),
        leased=farm.redis.zcard(Keys.LEASES),
        budget=farm.budget.read(),
        not_settled=farm.ledger.unresolved.counts(),
        reconciled_at=farm.ledger.unresolved.reconciled_at(),
    )


def _in_use(farm: Farm) -> dict[str, int]:
    """How many episodes wait, by queue: ours, and others that have any or that a worker serves; RQ forgets no name."""
    served = {farm.settings.queue, *(row.queue for row in farm.presence.workers())}
    return {name: waiting for name, waiting in farm.queue.depths().items() if waiting or name in served}


def registry_of(reading: FarmReading | None) -> CollectorRegistry:
    """A registry for one scrape; without a reading Redis is away, and that is all it says."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(reading))
    return registry


class _Once(Collector):
    def __init__(self, reading: FarmReading | None) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        """The families."""
        up = GaugeMetricFamily("farm_redis_up", "Whether the farm's Redis answered this scrape.")
        up.add_metric([], self._reading is not None)
        yield up
        if self._reading is not None:
            yield from families(self._reading)


def families(reading: FarmReading) -> Iterator[Metric]:
    """Every family of a reading."""
    yield from _counted(reading.counters)
    yield from _now(reading)
    yield from _limits(reading.limiter)
    yield from _money(reading)
    yield from _distributions(reading.counters)


def _counted(counters: Mapping[str, str]) -> Iterator[Metric]:
    def count(field: str) -> int:
        return int(counters.get(field, 0))

    yield _counter(
        "farm_episodes",
        "Episodes that ended, by outcome.",
        "outcome",
        {str(o): count(f"episodes:{o}") for o in Outcome},
    )
    yield _counter(
        "farm_sandboxes_created", "Sandboxes that got an id.", "role", {str(r): count(f"created:{r}") for r in Role}
    )
    yield _counter(
        "farm_rate_limited",
        "Creations answered 429, by kind.",
        "kind",
        {kind: count(f"rate_limited:{kind}") for kind in ("rate", "concurrency")},
    )
    yield _counter(
        "farm_cleanups",
        "How sandboxes were settled; unresolved is counted each time one could not be.",
        "result",
        {str(state): count(f"cleanups:{state}") for state in _CLEANUPS},
    )
    orphans = CounterMetricFamily("farm_orphans", "Sandboxes of this farm that belonged to nobody and were deleted.")
    orphans.add_metric([], count(ORPHANS_DELETED))
    yield orphans
    calls = CounterMetricFamily(
        "farm_tool_calls", "Calls of policies in ended episodes, by how they went.", labels=["tool", "result"]
    )
    for tool in TOOLS:
        for result in RESULTS:
            calls.add_metric([tool, result], count(f"tool_calls:{tool}:{result}"))
    yield calls
    yield _counter(
        "farm_sandbox_seconds",
        "Seconds that settled sandboxes ran.",
        "role",
        {str(r): float(Decimal(count(f"sandbox_ms:{r}")) / 1000) for r in Role},
    )
    yield _counter(
        "farm_cost_usd",
        "What settled sandboxes cost at the configured prices.",
        "role",
        {str(r): float(usd(count(f"cost_picousd:{r}"))) for r in Role},
    )


def _now(reading: FarmReading) -> Iterator[Metric]:
    yield _gauge("farm_queue_episodes", "Episodes waiting, by queue.", "queue", reading.queues)
    batches = GaugeMetricFamily("farm_waiting_batch_places", "Places that batches in line wait for.")
    batches.add_metric([], reading.limiter.batch_places_waiting)
    yield batches
    live = len(reading.slots)
    busy = min(reading.leased, live)
    yield _gauge("farm_slots", "Live slots.", "state", {"busy": busy, "idle": live - busy})
    workers = GaugeMetricFamily("farm_workers", "Workers with a live slot.")
    workers.add_metric([], len({worker_of(slot) for slot in reading.slots}))
    yield workers
    sandboxes = GaugeMetricFamily("farm_sandboxes", "Sandboxes that may be running.", labels=["role", "state"])
    found = {(row.role, row.state): row.count for row in reading.running}
    for role in Role:
        for state in _UNSETTLED:
            sandboxes.add_metric([role, state], found.get((role, state), 0))
    yield sandboxes
    stuck = GaugeMetricFamily("farm_unresolved_allocations", "Sandboxes whose end or existence is not confirmed.")
    stuck.add_metric([], sum(row.count for row in reading.running if row.state.stuck))
    yield stuck
    yield _gauge(
        "farm_not_settled",
        "What reconcilers could not settle: episodes, allocations, orphaned sandboxes, the provider's list.",
        "kind",
        {str(kind): count for kind, count in reading.not_settled.items()},
    )
    reconciled = GaugeMetricFamily(
        "farm_reconciled_timestamp_seconds", "When reconcilers ended a whole round last, by Redis's clock; 0: never."
    )
    reconciled.add_metric([], reading.reconciled_at or 0)
    yield reconciled


def _limits(limiter: LimiterReading) -> Iterator[Metric]:
    concurrency = {"configured": limiter.concurrency_configured, "effective": limiter.concurrency_effective}
    yield _gauge("farm_concurrency_limit", "Running sandboxes allowed, project-wide.", "kind", concurrency)
    rate = {"configured": limiter.rate_configured, "effective": limiter.rate_effective}
    yield _gauge("farm_creation_rate_limit", "Creations a second allowed; 0 is no limit of ours.", "kind", rate)
    cooldown = GaugeMetricFamily("farm_cooldown_seconds", "How long creations still pause after a 429.")
    cooldown.add_metric([], limiter.cooldown_seconds)
    yield cooldown


def _money(reading: FarmReading) -> Iterator[Metric]:
    burn = GaugeMetricFamily("farm_burn_usd_per_hour", "What the sandboxes that run now cost an hour.")
    burn.add_metric([], float(usd(burn_picousd_per_hour(reading.running))))
    yield burn
    budget = reading.budget
    amounts = {"spent": budget.spent_picousd, "reserved": budget.reserved_picousd}
    if budget.limit_picousd is not None:
        amounts["limit"] = budget.limit_picousd
    yield _gauge(
        "farm_budget_usd",
        "The farm's budget: reserved for running episodes, the limit if one is set, and spent: also what was reserved"
        " for creations that were never named, of which farm_cost_usd has nothing.",
        "kind",
        {kind: float(usd(amount)) for kind, amount in amounts.items()},
    )


def _distributions(counters: Mapping[str, str]) -> Iterator[Metric]:
    phases = HistogramMetricFamily("farm_episode_phase_seconds", "Phases of ended episodes.", labels=["phase"])
    for phase in Phase:
        _add(phases, [phase], distribution(counters, PHASE, phase))
    yield phases
    plain: tuple[tuple[str, str, Histogram], ...] = (
        ("farm_tool_call_seconds", "Terminal calls of ended episodes, as the worker saw them.", TOOL_CALL),
        ("farm_episode_reward", "Rewards of scored episodes.", REWARD),
        ("farm_episode_cost_usd", "What ended episodes cost, once all of their sandboxes are settled.", COST),
    )
    for name, text, histogram in plain:
        family = HistogramMetricFamily(name, text)
        _add(family, [], distribution(counters, histogram))
        yield family


def _add(family: HistogramMetricFamily, labels: list[str], found: Distribution) -> None:
    # le as a float, which is how OpenMetrics and Prometheus 3 spell it
    buckets = [(str(float(bound)) if bound != INFINITE else bound, count) for bound, count in found.buckets]
    family.add_metric(labels, buckets, sum_value=float(found.sum))


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
