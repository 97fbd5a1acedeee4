"""Reading a farm whose work is over, for `invariants.violations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from redis import Redis

from orchestrator.farm import Farm
from orchestrator.finished import START, Finished
from orchestrator.keys import Keys
from tests.chaos.invariants import Reading
from tests.support.redis_server import held, leaks


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
        announced=_announced(redis, run_id),
        counters={str(name): int(value) for name, value in redis.hgetall(Keys.COUNTERS).items()},
        leftovers={"sandboxes": sandboxes, "keys": leaks(redis), **held(redis)},
    )


def _announced(redis: Redis, run_id: str) -> list[str]:
    stream, position, found = Finished(redis, run_id), START, list[str]()
    while page := stream.after(position, 0.1):
        position = page[-1][0]
        found += [episode for _, episode in page]
    return found
