"""Processes of one farm that keep receipts for different times: nobody shortens what another one keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

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
    """Let what is listed have been written so long ago; the receipts live on."""
    for key in (Keys.RECEIPTS, Keys.ENDS, Keys.ends(run)):
        for member in cast("list[str]", redis.zrange(key, 0, -1)):
            redis.zincrby(key, -days * DAY * 1000, member)


def expired(redis: Redis, count: int, *, run: str = "run-test") -> None:
    """So many receipts that have come to their end since they were written."""
    for name in (f"e-gone-{number}" for number in range(count)):
        redis.zadd(Keys.RECEIPTS, {name: 1})
        redis.zadd(Keys.ENDS, {name: 1})
        redis.zadd(Keys.ends(run), {cast(str, redis.xadd(Keys.finished(run), {"episode": name})): 1})
    redis.expire(Keys.finished(run), LONG)
    redis.expire(Keys.ends(run), LONG)


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
    expired(redis, 70)
    listed = (Keys.RECEIPTS, Keys.ENDS, Keys.ends("run-test"))
    lengths = []
    for _ in range(5):
        spec, lease = leased(forgetful)
        forgetful.ledger.commit(a_receipt(spec), lease.token)
        lengths.append([*map(redis.zcard, listed), redis.xlen(Keys.finished("run-test"))])
    assert lengths == [[51] * 4, [32] * 4, [13] * 4, [4] * 4, [5] * 4]


def test_one_receipt_that_is_kept_for_longer_keeps_no_others_listed(
    patient: Farm, forgetful: Farm, redis: Redis
) -> None:
    receipts = Receipts(redis, patient.ledger.allocations)
    ended = []
    for farm in (patient, *[forgetful] * 30):
        spec, lease = leased(farm)
        farm.ledger.commit(a_receipt(spec), lease.token)
        ended.append(spec.episode_id)
    redis.delete(*(Keys.receipt(episode) for episode in ended[1:]))
    age(redis, "run-test", days=40)
    assert receipts.count_of_run("run-test") == 1
    for left in (12, 3):
        spec, lease = leased(forgetful)
        forgetful.ledger.commit(a_receipt(spec), lease.token)
        assert redis.zcard(Keys.RECEIPTS) == redis.xlen(Keys.finished("run-test")) == left
    assert receipts.count_of_run("run-test") == 3
    assert redis.zrange(Keys.RECEIPTS, 0, 0) == ended[:1]


def test_what_ended_in_one_run_leaves_the_index_by_any_other(forgetful: Farm, redis: Redis) -> None:
    expired(redis, 3, run="run-over")
    spec, lease = leased(forgetful)
    forgetful.ledger.commit(a_receipt(spec), lease.token)
    assert redis.zrange(Keys.RECEIPTS, 0, -1) == redis.zrange(Keys.ENDS, 0, -1) == [spec.episode_id]
    assert 0 < redis.ttl(Keys.ends("run-test")) <= redis.ttl(Keys.finished("run-test"))


def test_a_runs_count_leaves_out_what_expired_after_its_last_receipt(forgetful: Farm, redis: Redis) -> None:
    receipts = Receipts(redis, forgetful.ledger.allocations)
    for _ in range(3):
        spec, lease = leased(forgetful)
        forgetful.ledger.commit(a_receipt(spec), lease.token)
    assert receipts.count_of_run("run-test") == 3
    entries = cast("list[str]", redis.zrange(Keys.ends("run-test"), 0, -1))
    for left in (2, 1, 0):
        redis.zadd(Keys.ends("run-test"), {entries[left]: int(forgetful.ledger.now() * 1000)})
        assert receipts.count_of_run("run-test") == left
    assert receipts.count_of_run("run-unknown") == 0


def test_a_count_is_of_one_moment_whatever_ends_meanwhile(redis_url: str, forgetful: Farm, redis: Redis) -> None:
    expired(redis, 60)
    committed = 0

    class Busy(Redis):
        """Before each of its commands an episode ends, and takes expired ones off the list."""

        def execute_command(self, *args: Any, **options: Any) -> Any:
            nonlocal committed
            spec, lease = leased(forgetful)
            forgetful.ledger.commit(a_receipt(spec), lease.token)
            committed += 1
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    with Busy.from_url(redis_url, decode_responses=True) as busy:
        assert Receipts(busy, forgetful.ledger.allocations).count_of_run("run-test") == committed > 0
