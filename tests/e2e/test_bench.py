"""The benchmarks run: a few calls each on a real farm. What they measure is no test's business."""

from __future__ import annotations

from tests.bench.creation_ceiling import creation_ceiling
from tests.bench.episode_overhead import episode_overhead
from tests.bench.permits import permits
from tests.bench.scrape import scrape
from tests.bench.tool_call import tool_call
from tests.bench.worker_loss import worker_loss


def test_the_overhead_of_episodes_can_be_measured() -> None:
    rows = {row.name: row.value for row in episode_overhead(episodes=2, warm_up=1)}
    assert rows["inside provider calls"] > rows["of those calls: first of a fresh process"] > 0


def test_a_tool_call_through_redis_can_be_compared_with_a_direct_one() -> None:
    rows = {row.name: row.value for row in tool_call(count=4, warm_up=1)}
    assert rows["tool call through Redis, p50"] > 0
    assert rows["tool call straight to the server, p50"] > 0


def test_creations_against_a_metered_provider_can_be_measured() -> None:
    rows = {
        row.name: row.value for row in creation_ceiling(seconds=1, sdk_seconds=1, limit_seconds=2, workers=2, limit=2)
    }
    assert rows["creations, configured at the ceiling: of the ceiling"] > 0
    assert rows["creations, configured at the ceiling, burst 1: of the ceiling"] > 0
    assert rows["creations, the SDK's own retries instead: of the ceiling"] > 0
    assert 1 <= rows["sandboxes at once, limit 2: highest in the provider's log"] <= 2


def test_permits_can_be_contended_for() -> None:
    rows = {row.name: row.value for row in permits(processes=12, pairs=5, receipts=3, turns=2)}
    assert rows["permits: taken and freed, 12 processes"] > 0
    assert 2 <= rows["permits, limit binding: most held at once"] <= 8


def test_the_loss_of_a_worker_can_be_measured_with_and_without_creations_in_flight() -> None:
    soon = {"lease_renew_seconds": 0.5, "lease_lost_seconds": 2.0, "reconcile_seconds": 0.5}
    rows = {
        row.name: row.value
        for row in worker_loss(rounds=1, verifier_rounds=1, unknown_rounds=1, held_seconds=1.0, **soon)
    }
    assert rows["a worker killed with -9 is settled within"] >= rows["of it: with a running verifier"] > 0
    assert rows["the same, creations in flight whose outcome is unknown"] > 0


def test_a_scrape_can_be_measured() -> None:
    rows = {row.name: row.value for row in scrape(receipts=50, sandboxes=5, count=2)}
    assert rows["scrape of /metrics, p50"] > 0
