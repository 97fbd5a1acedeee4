"""Reading receipts: newest first, a page at a time, filtered; what has expired is passed over."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from redis import Redis

from orchestrator.cost import By
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import EpisodeSpec, SettledReceipt
from orchestrator.spending import Spending
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import a_receipt, a_spec, intended, leased, opened_farm, stored
from tests.support.waiting import wait_until

MANY = 450
"""More than two pages."""

BASE = (int(time.time()) - 3600) * 1000
"""When the first of many receipts was written, in milliseconds; within any retention."""


def ended(farm: Farm, outcome: Outcome = Outcome.CANCELLED, **changes: Any) -> EpisodeSpec:
    """An episode with its receipt, in a millisecond of its own: within one, names order receipts."""
    spec, lease = leased(farm, a_spec(**changes))
    farm.ledger.commit(a_receipt(spec, outcome, group_id=spec.group_id), lease.token)
    written = farm.ledger.now()
    wait_until(lambda: farm.ledger.now() > written + 0.001, description="the next millisecond")
    return spec


def bulk(redis: Redis, count: int, *, run: str = "run-test", at: int | None = None) -> list[str]:
    """So many receipts, oldest first, as commit_receipt leaves them; all in millisecond `at`, or one each."""
    names, pipeline = [], redis.pipeline()
    for number in range(count):
        spec = a_spec(f"e-{number:06d}", run_id=run)
        names.append(spec.episode_id)
        pipeline.set(Keys.receipt(spec.episode_id), a_receipt(spec).model_dump_json(), ex=1000)
        pipeline.zadd(Keys.RECEIPTS, {spec.episode_id: BASE + number if at is None else at})
        pipeline.xadd(Keys.finished(run), {"episode": spec.episode_id}, id=f"{BASE + number}-1")
    pipeline.expire(Keys.finished(run), 1000)
    pipeline.execute()
    return names


def second(number: int) -> float:
    """When receipt `number` of many was written."""
    return (BASE + number) / 1000


def reader(farm: Farm) -> Receipts:
    return Receipts(farm.redis, farm.ledger.allocations)


def ids(found: Iterable[SettledReceipt]) -> list[str]:
    return [settled.receipt.episode_id for settled in found]


def select(farm: Farm, limit: int | None = None, **wanted: object) -> list[str]:
    return ids(reader(farm).select(ReceiptFilter(**wanted), limit=limit))  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [None, "run-test"], ids=["all", "of a run"])
def test_every_receipt_comes_once_newest_first_over_pages(farm: Farm, redis: Redis, run: str | None) -> None:
    names = bulk(redis, MANY)
    assert select(farm, run_id=run) == names[::-1]
    assert select(farm, run_id=run, limit=7) == names[:-8:-1]


def test_a_thousand_receipts_of_one_millisecond_are_paged_too(farm: Farm, redis: Redis) -> None:
    names = bulk(redis, MANY, at=BASE)
    assert select(farm) == names[::-1]
    assert select(farm, until=BASE / 1000) == names[::-1]


def test_a_run_longer_than_the_retention_counts_what_has_its_receipt(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url, receipt_retention_seconds=60) as farm:
        for ago in (3600, 61, 50):
            written = (int(farm.ledger.now()) - ago) * 1000
            redis.xadd(Keys.finished("run-test"), {"episode": f"e-{ago}"}, id=f"{written}-1")
            redis.zadd(Keys.ends("run-test"), {f"{written}-1": written + 60_000})
        redis.set(Keys.receipt("e-50"), "{}", ex=10)
        ended(farm)
        assert redis.xlen(Keys.finished("run-test")) == reader(farm).count_of_run("run-test") == 2
        assert redis.ttl(Keys.finished("run-test")) in (59, 60)


def test_a_receipt_written_meanwhile_moves_nothing(farm: Farm, redis: Redis) -> None:
    names = bulk(redis, MANY)
    found = reader(farm).select(ReceiptFilter())
    first = next(found).receipt.episode_id
    ended(farm)
    assert [first, *ids(found)] == names[::-1]


@pytest.mark.parametrize("run", [None, "run-test"], ids=["all", "of a run"])
def test_since_and_until_bound_the_time_of_writing(farm: Farm, redis: Redis, run: str | None) -> None:
    names = bulk(redis, 10)
    assert select(farm, run_id=run, since=second(4)) == names[:3:-1]
    assert select(farm, run_id=run, until=second(4)) == names[4::-1]
    assert select(farm, run_id=run, since=second(3), until=second(5)) == [names[5], names[4], names[3]]
    assert select(farm, run_id=run, since=-5.0, until=second(-9)) == []


def test_every_filter_holds(farm: Farm) -> None:
    solved = ended(farm, Outcome.SOLVED, run_id="run-a", group_id="g-1")
    wrong = ended(farm, Outcome.WRONG_ANSWER, run_id="run-a", group_id="g-2")
    lost = ended(farm, Outcome.WORKER_LOST, run_id="run-b", group_id="g-1")
    everything = [spec.episode_id for spec in (lost, wrong, solved)]
    assert select(farm) == everything
    assert select(farm, run_id="run-a") == everything[1:]
    assert select(farm, group_id="g-1") == [lost.episode_id, solved.episode_id]
    assert select(farm, run_id="run-a", group_id="g-1") == [solved.episode_id]
    assert select(farm, scored=True) == everything[1:]
    assert select(farm, scored=False) == [lost.episode_id]
    assert select(farm, outcomes=frozenset({Outcome.SOLVED, Outcome.WORKER_LOST})) == everything[::2]
    assert select(farm, task_id="weekly-sales") == everything
    assert select(farm, task_id="another") == []
    assert select(farm, run_id="run-c") == []
    assert reader(farm).knows_run("run-a")
    assert not reader(farm).knows_run("run-c")


def test_a_receipt_that_expired_or_cannot_be_read_does_not_end_the_list(
    farm: Farm, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    names = bulk(redis, 5)
    redis.delete(Keys.receipt(names[1]))
    redis.set(Keys.receipt(names[3]), '{"schema_version": 99}', ex=100)
    for run in (None, "run-test"):
        assert select(farm, run_id=run) == [names[4], names[2], names[0]]
    assert f"left out: {names[3]}" in caplog.text


def test_a_receipt_comes_with_its_allocations_as_they_stand(farm: Farm) -> None:
    specs = []
    for number in range(3):
        spec, lease = leased(farm)
        row = intended(farm, spec, lease)
        farm.ledger.allocations.created(row, f"sbx-{number}", lease.token, creating_ms=5)
        row = farm.ledger.allocations.sized(stored(farm, row.allocation_id), vcpus=2, memory_mb=512).row
        farm.ledger.allocations.absent(row, lease.token, running_ms=1000 * (number + 1))
        farm.ledger.commit(a_receipt(spec, Outcome.SOLVED, allocations=(row.allocation_id,)), lease.token)
        specs.append(spec)
    found = list(reader(farm).select(ReceiptFilter()))
    assert [settled.allocations[0].sandbox_id for settled in found] == ["sbx-2", "sbx-1", "sbx-0"]
    assert found[0] == farm.ledger.receipt(specs[2].episode_id)
    total = sum(settled.cost_picousd for settled in found)
    assert total == int(farm.redis.hget(Keys.COUNTERS, "cost_picousd:policy") or 0) > 0


@pytest.mark.parametrize("between", [0, MANY], ids=["on one page", "pages apart"])
def test_an_id_run_again_is_one_receipt_of_its_run(farm: Farm, redis: Redis, between: int) -> None:
    """The entry of its first life stays in the run's stream until some later commit trims it."""
    first = ended(farm, episode_id="e-again")
    redis.delete(Keys.receipt(first.episode_id), Keys.episode(first.episode_id))  # as their common end does
    others = [f"e-{number:06d}" for number in range(between)]
    for name in others:
        redis.set(Keys.receipt(name), a_receipt(a_spec(name)).model_dump_json(), ex=1000)
        redis.xadd(Keys.finished("run-test"), {"episode": name})
    ended(farm, Outcome.SOLVED, episode_id="e-again")

    newest_first = ["e-again", *others[::-1]]
    assert select(farm, run_id="run-test") == newest_first
    assert select(farm, run_id="run-test", limit=1) == ["e-again"]
    _, bill = Spending(farm.ledger, reader(farm)).bills(By.EPISODE, ReceiptFilter(run_id="run-test"))
    assert bill.episodes == len(newest_first)


def test_an_id_that_runs_again_is_no_receipt_of_its_run_yet(farm: Farm, redis: Redis) -> None:
    first = ended(farm, episode_id="e-again")
    redis.delete(Keys.receipt(first.episode_id), Keys.episode(first.episode_id))
    spec, lease = leased(farm, a_spec("e-again"))
    assert select(farm, run_id="run-test") == []
    farm.ledger.commit(a_receipt(spec), lease.token)


@pytest.mark.parametrize("run", [None, "run-test"], ids=["all", "of a run"])
def test_an_export_never_holds_more_than_a_page(farm: Farm, redis: Redis, run: str | None) -> None:
    """Memory at its highest is the same for many pages as for few."""
    wanted = ReceiptFilter(run_id=run)

    def peak(count: int) -> int:
        tracemalloc.start()
        try:
            assert sum(1 for _ in reader(farm).select(wanted, limit=count)) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    bulk(redis, 4_000)
    peak(400)  # what is only allocated once
    assert peak(4_000) < 1.5 * peak(400)
