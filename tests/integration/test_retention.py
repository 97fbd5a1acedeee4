"""Processes of one farm that keep receipts for different times: nobody shortens what another one keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from redis import Redis

from orchestrator.allocations import RECONCILER_TOKEN
from orchestrator.cost import By
from orchestrator.errors import FarmError
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import EpisodeSpec, Script
from orchestrator.rows import Lease
from orchestrator.spending import Spending
from orchestrator.transcripts import Transcript
from orchestrator.vocabulary import Outcome, Role, job_id
from tests.support.bare_farm import TASK, a_receipt, ended_unresolved, farm_settings, intended, leased, opened_farm

DAY = 86_400
LONG, SHORT = 90 * DAY, 30 * DAY


@pytest.fixture
def patient(redis_url: str) -> Iterator[Farm]:
    """A process that keeps receipts for 90 days."""
    with opened_farm(redis_url, receipt_retention_seconds=LONG) as farm:
        yield farm


@pytest.fixture
def forgetful(redis_url: str) -> Iterator[Farm]:
    """One that keeps them for 30."""
    with opened_farm(redis_url, receipt_retention_seconds=SHORT) as farm:
        yield farm


def with_sandbox(farm: Farm) -> tuple[EpisodeSpec, Lease, str]:
    """A running episode whose policy sandbox ran for ten seconds and is settled."""
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.created(row, f"sbx-{spec.episode_id}", lease.token, creating_ms=0)
    farm.ledger.allocations.absent(row, lease.token, running_ms=10_000)
    return spec, lease, row.allocation_id


def age(redis: Redis, run: str, *, days: int) -> None:
    """Let what is listed have been written so long ago; the keys live on."""
    back = days * DAY * 1000
    index = cast("list[tuple[str, float]]", redis.zrange(Keys.RECEIPTS, 0, -1, withscores=True))
    redis.zadd(Keys.RECEIPTS, {episode: written - back for episode, written in index})
    entries = cast("list[tuple[str, dict[str, str]]]", redis.xrange(Keys.finished(run)))
    redis.delete(Keys.finished(run))
    for name, fields in entries:
        redis.xadd(Keys.finished(run), {"episode": fields["episode"]}, id=f"{int(name.partition('-')[0]) - back}-*")
    redis.expire(Keys.finished(run), LONG - days * DAY)


def test_a_shorter_retention_takes_nobodys_receipts_off_the_lists(patient: Farm, forgetful: Farm, redis: Redis) -> None:
    for _ in range(30):
        spec, lease, name = with_sandbox(patient)
        patient.ledger.commit(a_receipt(spec, Outcome.SOLVED, allocations=(name,)), lease.token)
    age(redis, "run-test", days=40)
    spec, lease = leased(forgetful)
    forgetful.ledger.commit(a_receipt(spec), lease.token)

    receipts = Receipts(forgetful.redis, forgetful.ledger.allocations)
    for wanted in (ReceiptFilter(), ReceiptFilter(run_id="run-test")):
        assert len(list(receipts.select(wanted))) == 31
    assert receipts.count_of_run("run-test") == 31
    _, total = Spending(forgetful.ledger, receipts).bills(By.ROLE, ReceiptFilter())
    assert total.cost_picousd == int(redis.hget(Keys.COUNTERS, f"cost_picousd:{Role.POLICY}") or 0) > 0


def test_a_runs_stream_lives_as_long_as_its_longest_receipt(patient: Farm, forgetful: Farm, redis: Redis) -> None:
    for farm in (patient, forgetful):
        spec, lease = leased(farm)
        farm.ledger.commit(a_receipt(spec), lease.token)
    assert redis.ttl(Keys.finished("run-test")) > LONG - 60


def test_what_a_receipt_names_was_settled_by_a_process_with_a_shorter_retention(
    patient: Farm, forgetful: Farm, redis: Redis
) -> None:
    spec, lease, name = with_sandbox(forgetful)
    transcript = Transcript(redis, spec.episode_id, limit_bytes=1000, retention_seconds=SHORT)
    transcript.add("terminal", "true")
    transcript.flush()
    patient.ledger.commit(a_receipt(spec, allocations=(name,)), lease.token)
    kept = redis.ttl(Keys.receipt(spec.episode_id))
    assert kept > LONG - 60
    for key in (Keys.episode(spec.episode_id), Keys.allocation(name), Keys.transcript(spec.episode_id)):
        assert redis.ttl(key) >= kept, key


def test_a_late_settlement_with_a_shorter_retention_keeps_what_the_receipt_names(
    patient: Farm, forgetful: Farm, redis: Redis
) -> None:
    row, _ = ended_unresolved(patient)
    forgetful.ledger.allocations.absent(row, RECONCILER_TOKEN, running_ms=1000)
    kept = redis.ttl(Keys.receipt(row.episode_id))
    assert kept > LONG - 60
    for key in (Keys.episode(row.episode_id), Keys.allocation(row.allocation_id)):
        assert redis.ttl(key) >= kept, key


def test_an_ended_row_goes_with_its_receipt_whoever_settles(patient: Farm, forgetful: Farm, redis: Redis) -> None:
    row, _ = ended_unresolved(forgetful)
    patient.ledger.allocations.absent(row, RECONCILER_TOKEN, running_ms=1000)
    assert 0 < redis.pttl(Keys.episode(row.episode_id)) <= redis.pttl(Keys.receipt(row.episode_id)) + 1


def test_nobody_waits_for_a_receipt_that_is_gone_while_the_row_stands(redis_url: str, redis: Redis) -> None:
    with opened_farm(redis_url) as farm, Pool(farm_settings(redis_url), run_id="run-test") as pool:
        row, _ = ended_unresolved(farm)
        redis.delete(
            Keys.receipt(row.episode_id)
        )  # as the end of its time does, which an unsettled sandbox's row has not
        assert farm.ledger.knows(row.episode_id)
        episode = pool.submit(TASK, policy=Script(commands=("true",)), episode_id=row.episode_id)
        with pytest.raises(FarmError, match="does not know"):
            list(pool.as_completed([episode], timeout_seconds=0.1))
        with pytest.raises(FarmError, match="does not know"):
            episode.wait(timeout_seconds=0.1)
        farm.queue.withdraw(job_id(row.episode_id, 1))  # as the worker does that finds its episode over
        farm.ledger.allocations.absent(row, RECONCILER_TOKEN, running_ms=1000)
        assert 0 < redis.ttl(Keys.episode(row.episode_id)) <= 30 * DAY, "nobody else keeps it from its end"


def test_an_unsettled_sandbox_gets_no_end_with_its_receipt(patient: Farm, redis: Redis) -> None:
    row, _ = ended_unresolved(patient)
    assert redis.ttl(Keys.allocation(row.allocation_id)) == -1
    patient.ledger.allocations.absent(row, RECONCILER_TOKEN, running_ms=1000)


def test_many_expired_receipts_leave_the_lists_over_the_next_ones(forgetful: Farm, redis: Redis) -> None:
    for number in range(70):
        redis.zadd(Keys.RECEIPTS, {f"e-gone-{number}": number})
        redis.xadd(Keys.finished("run-test"), {"episode": f"e-gone-{number}"}, id=f"1-{number + 1}")
    lengths = []
    for _ in range(5):
        spec, lease = leased(forgetful)
        forgetful.ledger.commit(a_receipt(spec), lease.token)
        lengths.append((redis.zcard(Keys.RECEIPTS), redis.xlen(Keys.finished("run-test"))))
    assert lengths == [(51, 51), (32, 32), (13, 13), (4, 4), (5, 5)]


def test_a_runs_count_leaves_out_what_expired_after_its_last_receipt(forgetful: Farm, redis: Redis) -> None:
    receipts = Receipts(redis, forgetful.ledger.allocations)
    ended = []
    for _ in range(450):  # more than two pages
        spec, lease = leased(forgetful)
        forgetful.ledger.commit(a_receipt(spec), lease.token)
        ended.append(spec.episode_id)
    for gone, left in ((3, 447), (250, 200), (449, 1), (450, 0)):
        redis.delete(*(Keys.receipt(episode) for episode in ended[:gone]))  # as the end of their time does
        assert receipts.count_of_run("run-test") == left
    assert receipts.count_of_run("run-unknown") == 0
