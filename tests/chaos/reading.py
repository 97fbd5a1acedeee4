"""Reading a farm whose work is over, for `invariants.violations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from orchestrator.farm import Farm
from orchestrator.keys import Keys
from tests.chaos.invariants import Reading
from tests.support.metrics import differences, scrape, series
from tests.support.redis_server import announced, held, leaks


def read(
    farm: Farm, run_id: str, *, expected: Mapping[str, float], told: Mapping[str, float], sandboxes: Sequence[str]
) -> Reading:
    """The farm as it stands; `sandboxes` are those that its provider still lists, the rest is the run's."""
    redis, ledger = farm.redis, farm.ledger
    written = cast("list[tuple[str, float]]", redis.zrange(Keys.RECEIPTS, 0, -1, withscores=True))
    receipts = {episode: settled for episode, _ in written if (settled := ledger.receipt(episode)) is not None}
    return Reading(
        expected=expected,
        told=told,
        receipts=receipts,
        written_at={episode: score / 1000 for episode, score in written},
        announced=announced(redis, run_id),
        counters={str(name): int(value) for name, value in redis.hgetall(Keys.COUNTERS).items()},
        metrics=differences(farm, series(scrape(farm))),
        leftovers={"sandboxes": sandboxes, "keys": leaks(redis), **held(redis)},
    )
