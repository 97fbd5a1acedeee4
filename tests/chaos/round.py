"""One round: traffic and blows at random moments until every episode has its receipt, then quiet, then the reading."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from orchestrator.farm import Farm, open_farm
from orchestrator.keys import Keys
from orchestrator.provider import Provider
from orchestrator.records import Allocation
from orchestrator.unresolved import ORPHANS_DELETED
from tests.chaos.invariants import Reading, shows_nothing, violations
from tests.chaos.plant import Plant, Target, plant
from tests.chaos.reading import read
from tests.chaos.service_log import ServiceLog, contradictions
from tests.chaos.traffic import Traffic, drive
from tests.support.redis_server import leaks
from workers.sandboxes.provider import E2BProvider

_TARGETS = (
    (Target.HORSE, 4),
    (Target.SLOT, 3),
    (Target.WORKER, 2),
    (Target.TERMINUS, 3),
    (Target.ORCHESTRATOR, 2),
    (Target.SANDBOXES, 1),
    (Target.REDIS, 1),
    (Target.FREEZE, 2),
)
"""What blows fall on, with weights: a dead service ends every episode that runs, so it is struck less often."""

_EVERY_KIND_EPISODES = 100
"""From so many episodes on a round lasts long enough for every kind of blow; then each has to have fallen."""

_SETTLE_SECONDS = 150.0
"""For what was left open when the last receipt came: at most a first lifetime and a create request's patience."""


FAULTS: Mapping[str, Any] = {
    "rate_limited": "4%",
    "lost": {"create": "4%"},
    "unavailable": {"delete": "4%"},
    "delete_lag_seconds": 0.3,
    "latency": {"create": "exponential:0.1"},
    "page": {"command": "1%", "download": "2%", "files": "0.5%", "probe": "1%", "info": "1%", "delete": "1%"},
    "page_status": 200,
    "hung": {"command": "0.5%"},
    "stream_cut": "1%",
    "stream_stalled": "1%",
}
"""What a service does wrong in a round with faults; deletions lag behind their answers."""


_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Outcome:
    """What a round came to."""

    seed: int
    seconds: float
    blows: Counter[str]
    outcomes: Counter[str]
    restarts: dict[str, int]
    sandboxes: dict[str, int]
    """Of the provider's own log: created, most at once; and how many were deleted as orphans."""
    violations: list[str]


def play(
    directory: Path,
    *,
    seed: int,
    episodes: int,
    workers: int,
    rest_seconds: tuple[float, float],
    faults: Mapping[str, Any] = MappingProxyType({}),
) -> Outcome:
    """Play one round in `directory`; between two blows the farm has `rest_seconds` (least, most).

    `faults` are what the sandbox service does wrong by itself, as its admin route takes them.
    """
    random, began = Random(seed), time.monotonic()
    with (
        plant(directory, workers=workers, faults={**faults, "seed": seed} if faults else {}) as farm_plant,
        _service_log(farm_plant) as log,
    ):
        traffic, training = drive(farm_plant.settings, episodes, seed)
        blows = _strike_until(traffic, farm_plant, random, rest_seconds)
        training.result()
        farm, provider = open_farm(farm_plant.settings), _provider(farm_plant)
        _await_quiet(farm, farm_plant, provider)
        reading = _read(farm, provider, traffic)
        rows = _allocations(farm, traffic)
        left = {"processes": farm_plant.stop_farm()}
        log.close()
        farm.redis.close()
        left |= farm_plant.stop_servers()
    problems = violations(reading) + contradictions(log.lives, rows, limit=farm_plant.settings.concurrency_limit)
    problems += [f"left: {kind}: {item}" for kind, items in left.items() for item in items]
    outcomes = Counter(str(settled.receipt.outcome) for settled in reading.receipts.values())
    problems += shows_nothing(outcomes, blows, list(Target) if episodes >= _EVERY_KIND_EPISODES else [])
    return Outcome(
        seed,
        time.monotonic() - began,
        blows,
        outcomes,
        farm_plant.starts,
        {
            "created": sum(event["event"] == "created" for life in log.lives for event in life.events),
            "most at once": max((event["live"] for life in log.lives for event in life.events), default=0),
            "deleted as orphans": reading.counters.get(ORPHANS_DELETED, 0),
        },
        problems + traffic.faults,
    )


def _strike_until(traffic: Traffic, farm_plant: Plant, random: Random, rest: tuple[float, float]) -> Counter[str]:
    """Strike until the traffic is done; every kind once before any weight counts."""
    kinds, weights = zip(*_TARGETS, strict=True)
    first = random.sample(kinds, len(kinds))
    blows: Counter[str] = Counter()
    while not traffic.done.wait(random.uniform(*rest)):
        target = first[-1] if first else random.choices(kinds, weights)[0]
        if farm_plant.strike(target, random) is not None:
            blows[str(target)] += 1
            if first:
                first.pop()
        time.sleep(random.uniform(0, 0.5))  # a service stays away for a moment
        farm_plant.mend()
    farm_plant.mend()
    return blows


def _await_quiet(farm: Farm, farm_plant: Plant, provider: Provider) -> None:
    """Until everything is settled, or should have been: what is not then is in the reading."""
    ledger, tag, ends = farm.ledger, farm.ledger.farm_tag(), time.monotonic() + _SETTLE_SECONDS

    def settled() -> bool:
        if farm_plant.frozen or ledger.open_episodes() or ledger.allocations.unsettled() or ledger.lease_ends():
            return False
        if farm.redis.zcard(Keys.CREATORS):  # of whoever was killed there, until its silence is long
            return False
        # an orphan waits for its sweep, and RQ is told of a job's end just after the receipt
        return not provider.list({"farm": tag}) and not leaks(farm.redis)

    farm_plant.mend()
    while not settled() and time.monotonic() < ends:
        time.sleep(_LOOK_SECONDS)
        farm_plant.mend()


def _read(farm: Farm, provider: Provider, traffic: Traffic) -> Reading:
    sandboxes = [row.sandbox_id for row in provider.list({"farm": farm.ledger.farm_tag()})]
    return read(farm, traffic.run_id, expected=traffic.expected, told=traffic.told, sandboxes=sandboxes)


def _allocations(farm: Farm, traffic: Traffic) -> list[Allocation]:
    """Every row that the round ever intended."""
    ledger = farm.ledger
    names = [name for episode in traffic.expected for name in ledger.allocation_ids(episode)]
    return [row for row in ledger.allocations.each(names) if row is not None]


def _service_log(farm_plant: Plant) -> ServiceLog:
    settings = farm_plant.settings
    assert settings.e2b_api_key is not None
    return ServiceLog(settings.e2b_api_url or "", settings.e2b_api_key.get_secret_value())


def _provider(farm_plant: Plant) -> Provider:
    key = farm_plant.settings.e2b_api_key
    assert key is not None
    return E2BProvider(key.get_secret_value(), api_url=farm_plant.settings.e2b_api_url)
