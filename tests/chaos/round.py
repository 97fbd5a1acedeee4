"""One round: traffic and blows at random moments until every episode has its receipt, then quiet, then the reading."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

from redis import Redis

from orchestrator.farm import Farm, open_farm
from orchestrator.finished import START, Finished
from orchestrator.keys import Keys
from orchestrator.provider import Provider
from tests.chaos.invariants import Reading, violations
from tests.chaos.plant import Plant, Target, plant
from tests.chaos.traffic import Traffic, drive
from tests.support.redis_server import leaks
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider

_TARGETS = (
    (Target.HORSE, 4),
    (Target.SLOT, 3),
    (Target.WORKER, 2),
    (Target.TERMINUS, 3),
    (Target.ORCHESTRATOR, 2),
    (Target.SANDBOXES, 1),
    (Target.REDIS, 1),
)
"""What blows fall on, with weights: a dead service ends every episode that runs, so it is struck less often."""

_SETTLE_SECONDS = 150.0
"""For what was left open when the last receipt came: at most a first lifetime and a create request's patience."""


@dataclass(frozen=True)
class Outcome:
    """What a round came to."""

    seed: int
    seconds: float
    blows: Counter[str]
    outcomes: Counter[str]
    restarts: dict[str, int]
    violations: list[str]


def play(directory: Path, *, seed: int, episodes: int, workers: int, rest_seconds: tuple[float, float]) -> Outcome:
    """Play one round in `directory`; between two blows the farm has `rest_seconds` (least, most)."""
    random, began = Random(seed), time.monotonic()
    with plant(directory, workers=workers) as farm_plant:
        traffic, training = drive(farm_plant.settings, episodes, seed)
        blows = _strike_until(traffic, farm_plant, random, rest_seconds)
        training.result()
        farm, provider = open_farm(farm_plant.settings), _provider(farm_plant)
        _await_quiet(farm, farm_plant)
        reading = _read(farm, provider, traffic)
        left = {"processes": [str(pid) for pid in farm_plant.stop()]}
        left["directories"] = [path.name for path in farm_plant.sandbox_root.rglob("run-*")]
        farm.redis.close()
    problems = violations(reading) + [f"left: {kind}: {item}" for kind, items in left.items() for item in items]
    return Outcome(
        seed,
        time.monotonic() - began,
        blows,
        Counter(str(settled.receipt.outcome) for settled in reading.receipts.values()),
        farm_plant.starts,
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


def _await_quiet(farm: Farm, farm_plant: Plant) -> None:
    def quiet() -> bool:
        farm_plant.mend()
        return not (farm.ledger.open_episodes() or farm.ledger.allocations.unsettled() or farm.ledger.lease_ends())

    wait_until(quiet, description="what was left open is settled", seconds=_SETTLE_SECONDS)


def _read(farm: Farm, provider: Provider, traffic: Traffic) -> Reading:
    redis, ledger = farm.redis, farm.ledger
    written = cast("list[tuple[str, float]]", redis.zrange(Keys.RECEIPTS, 0, -1, withscores=True))
    receipts = {episode: settled for episode, _ in written if (settled := ledger.receipt(episode)) is not None}
    return Reading(
        expected=traffic.expected,
        told=traffic.told,
        receipts=receipts,
        written_at={episode: score / 1000 for episode, score in written},
        announced=[episode for _, episode in Finished(redis, traffic.run_id).after(START, 1)],
        counters={str(name): int(value) for name, value in redis.hgetall(Keys.COUNTERS).items()},
        leftovers={
            "sandboxes": [row.sandbox_id for row in provider.list({"farm": ledger.farm_tag()})],
            "keys": leaks(redis),
            **{key: _members(redis, key) for key in (Keys.PERMITS, Keys.WAITERS, Keys.LEASES, Keys.OPEN)},
        },
    )


def _members(redis: Redis, key: str) -> list[str]:
    return cast("list[str]", redis.zrange(key, 0, -1))


def _provider(farm_plant: Plant) -> Provider:
    key = farm_plant.settings.e2b_api_key
    assert key is not None
    return E2BProvider(key.get_secret_value(), api_url=farm_plant.settings.e2b_api_url)
