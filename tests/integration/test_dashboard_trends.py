"""The page's charts over more episodes than it keeps: what is missing is said, not drawn as if nothing had happened."""

from __future__ import annotations

from redis import Redis

from orchestrator.dashboard.history import RING
from orchestrator.dashboard.lookout import Lookout
from orchestrator.dashboard.panes import Asked, changed
from orchestrator.dashboard.wording import day_and_clock
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from tests.support.bare_farm import a_receipt, a_spec

EVERY_SECONDS = 20
"""2,000 of them are eleven hours."""


def write(farm: Farm, redis: Redis, count: int) -> list[float]:
    """So many receipts, newest first, one every 20 s; when each ended."""
    now, pipeline = farm.ledger.now(), redis.pipeline()
    ends = [now - number * EVERY_SECONDS for number in range(count)]
    for number, end in enumerate(ends):
        spec = a_spec(f"e-{number:06d}")
        receipt = a_receipt(spec, queued_at=end - 2, started_at=end - 1, finished_at=end)
        pipeline.set(Keys.receipt(spec.episode_id), receipt.model_dump_json(), ex=100)
        pipeline.zadd(Keys.RECEIPTS, {spec.episode_id: int(end * 1000)})
    pipeline.execute()
    return ends


def trends(farm: Farm, window: str) -> str:
    return str(changed(Lookout(farm), Asked(window=window))["trends"])


def test_charts_longer_than_what_is_kept_say_from_when_on_they_are_whole(farm: Farm, redis: Redis) -> None:
    ends = write(farm, redis, RING + 500)
    said = f"Only the newest 2,000 episodes, back to {day_and_clock(ends[RING - 1])} UTC; for longer use Prometheus."
    assert said in trends(farm, "24 h")
    assert "Only the newest" not in trends(farm, "6 h")


def test_charts_that_lack_nothing_say_nothing(farm: Farm, redis: Redis) -> None:
    write(farm, redis, 50)
    assert "Only the newest" not in trends(farm, "24 h")
