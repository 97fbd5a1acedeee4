"""The benchmarks run: a few calls each on a real farm. What they measure is no test's business."""

from __future__ import annotations

from tests.bench.episode_overhead import episode_overhead
from tests.bench.scrape import scrape
from tests.bench.tool_call import tool_call


def test_the_overhead_of_episodes_can_be_measured() -> None:
    rows = {row.name: row.value for row in episode_overhead(episodes=2, warm_up=1)}
    assert rows["inside provider calls"] > rows["of those calls: first of a fresh process"] > 0


def test_a_tool_call_through_redis_can_be_compared_with_a_direct_one() -> None:
    rows = {row.name: row.value for row in tool_call(count=4, warm_up=1)}
    assert rows["tool call through Redis, p50"] > 0
    assert rows["tool call straight to the server, p50"] > 0


def test_a_scrape_can_be_measured() -> None:
    rows = {row.name: row.value for row in scrape(receipts=50, sandboxes=5, count=2)}
    assert rows["scrape of /metrics, p50"] > 0
