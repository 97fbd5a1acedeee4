"""How long a scrape takes on a farm of 100,000 receipts and 1,000 live sandboxes, over HTTP, as Prometheus does it.

The rows and receipts are written straight into Redis, as the scripts leave them; what is measured is the real reading,
the real application and a real Redis.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import httpx

from deploy.web_server import serving
from orchestrator.counts import counts_of
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.metrics import read
from orchestrator.records import Operation, Receipt
from orchestrator.vocabulary import Outcome, Phase, Role, allocation_id
from orchestrator.web import create_app
from tests.bench.rows import Goal, Row, spread
from tests.bench.stand import milliseconds
from tests.support.bare_farm import a_receipt, a_spec, opened_farm
from tests.support.redis_server import running_redis

_RECEIPTS = 100_000
_SANDBOXES = 1_000
_SCRAPES = 50
_CHUNK = 5_000


def scrape(receipts: int = _RECEIPTS, sandboxes: int = _SANDBOXES, count: int = _SCRAPES) -> list[Row]:
    """Rows of one scrape, and of the part that Redis and its client take of it."""
    with (
        tempfile.TemporaryDirectory(prefix="scrape-") as directory,
        running_redis(Path(directory) / "redis") as url,
        opened_farm(url, concurrency_limit=sandboxes) as farm,
    ):
        _fill(farm, receipts, sandboxes)
        with serving(create_app(farm), "127.0.0.1", 0) as where, httpx.Client() as client:
            _seconds(client, f"{where}/metrics")
            began = _processor_seconds(farm)
            whole = milliseconds([_seconds(client, f"{where}/metrics") for _ in range(count)])
            spent = (_processor_seconds(farm) - began) / count
        looks = []
        for _ in range(count):
            began = time.perf_counter()
            read(farm)
            looks.append(time.perf_counter() - began)
    about = f"{receipts} receipts, {sandboxes} live sandboxes"
    return [
        Row("scrape of /metrics, p50", median(whole), "ms", Goal("<=", 50), f"GET over HTTP; {about}; {spread(whole)}"),
        Row(
            "of it processor time, mean",
            1000 * spent,
            "ms",
            None,
            "of the orchestrator, Redis and the client that asks; other load on this machine is not in it",
        ),
        Row("of it reading Redis, p50", median(milliseconds(looks)), "ms", None, spread(milliseconds(looks))),
    ]


def _processor_seconds(farm: Farm) -> float:
    """Of this process and of Redis."""
    used = farm.redis.info("cpu")
    return time.process_time() + float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def _seconds(client: httpx.Client, url: str) -> float:
    began = time.perf_counter()
    client.get(url).raise_for_status()
    return time.perf_counter() - began


def _fill(farm: Farm, receipts: int, sandboxes: int) -> None:
    """Receipts, the counters that they would have left, and rows of sandboxes that run."""
    sample = a_receipt(
        a_spec(),
        Outcome.SOLVED,
        operations=tuple(Operation(name="terminal", seconds=0.01) for _ in range(5)),
        phases={str(phase): 0.1 for phase in Phase},
    )
    for start in range(0, receipts, _CHUNK):
        _write_receipts(farm, sample, range(start, min(start + _CHUNK, receipts)))
    counts = {name: each * receipts for name, each in counts_of(sample).items()}
    counts["episodes:solved"] = receipts
    farm.redis.hset(Keys.COUNTERS, mapping={name: str(count) for name, count in counts.items()})
    now_ms = int(1000 * farm.ledger.now())
    pipeline = farm.redis.pipeline(transaction=False)
    for number in range(sandboxes):
        episode, allocation = f"e-live-{number}", allocation_id(f"e-live-{number}", 1, Role.POLICY)
        row: dict[str, str | int] = {"allocation": allocation, "episode": episode, "role": "policy", "state": "created"}
        row |= {"vcpus": 2, "memory_mb": 512, "created_at": now_ms, "creating_ms": 30, "longest_ms": 600_000}
        pipeline.hset(Keys.allocation(allocation), mapping=row)  # type: ignore[arg-type]
        pipeline.hset(Keys.episode(episode), "rates", "14000000:2250000")
        pipeline.zadd(Keys.ALLOCATIONS, {allocation: number})
        pipeline.zadd(Keys.PERMITS, {f"e-live-{number}": number})
    pipeline.execute()


def _write_receipts(farm: Farm, sample: Receipt, numbers: range) -> None:
    pipeline = farm.redis.pipeline(transaction=False)
    text = sample.model_dump_json()
    for number in numbers:
        episode = f"e-{number}"
        pipeline.set(Keys.receipt(episode), text.replace(sample.episode_id, episode), ex=3600)
    pipeline.zadd(Keys.RECEIPTS, {f"e-{number}": number for number in numbers})
    pipeline.execute()
