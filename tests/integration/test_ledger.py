"""Rows, leases and receipts on a real Redis: who may write, what is written once, what frees a permit."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from redis import Redis

from orchestrator.allocations import RECONCILER_TOKEN
from orchestrator.errors import FarmError, LeaseLost
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import Admission
from orchestrator.records import Operation
from orchestrator.rows import Lease
from orchestrator.settings import Settings
from orchestrator.vocabulary import EpisodeState, Outcome, Role, job_id
from tests.support.bare_farm import (
    a_receipt,
    a_spec,
    admit,
    expire,
    farm_settings,
    intended,
    leased,
    opened_farm,
    stored,
)
from tests.support.waiting import wait_until

RETENTION = 1000


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=1, receipt_retention_seconds=RETENTION)


def test_a_row_is_open_before_its_job_exists(farm: Farm) -> None:
    spec = a_spec()
    assert farm.ledger.open(spec)
    row = farm.ledger.row(spec.episode_id)
    assert row is not None
    assert (row.state, row.attempt, row.job_id) == (EpisodeState.QUEUED, 1, job_id(spec.episode_id, 1))
    assert row.spec == spec
    assert farm.ledger.open_episodes() == [spec.episode_id]
    assert farm.queue.depth() == 0


def test_opening_twice_is_the_same_episode(farm: Farm, redis: Redis) -> None:
    spec = a_spec()
    assert farm.ledger.open(spec)
    before = redis.hgetall(Keys.episode(spec.episode_id))
    assert not farm.ledger.open(spec.model_copy(update={"run_id": "run-other"}))
    assert redis.hgetall(Keys.episode(spec.episode_id)) == before


def test_opening_a_finished_episode_does_not_reopen_it(farm: Farm) -> None:
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec), lease.token)
    assert not farm.ledger.open(spec)
    assert farm.ledger.open_episodes() == []


def test_two_takers_get_one_lease(farm: Farm) -> None:
    for _ in range(20):
        spec = a_spec()
        farm.ledger.open(spec)
        barrier = threading.Barrier(4)
        taken: list[Lease] = []

        def take(owner: str, episode_id: str = spec.episode_id, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(5)
            if lease := farm.ledger.take(episode_id, 1, owner, lease_seconds=30):
                taken.append(lease)  # noqa: B023 - joined within this round

        threads = [threading.Thread(target=take, args=(f"owner-{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
        assert len(taken) == 1


def test_the_same_owner_asking_again_gets_the_same_lease(farm: Farm) -> None:
    spec = a_spec()
    farm.ledger.open(spec)
    first = farm.ledger.take(spec.episode_id, 1, "owner", lease_seconds=30)
    assert first is not None
    assert farm.ledger.take(spec.episode_id, 1, "owner", lease_seconds=30) == first


def test_a_lease_names_the_farm_and_says_whether_the_end_was_asked_for(farm: Farm) -> None:
    spec, lease = leased(farm)
    assert (lease.cancelled, lease.farm_tag) == (False, farm.ledger.farm_tag())
    unwanted = a_spec()
    farm.ledger.open(unwanted)
    farm.ledger.cancel(unwanted.episode_id)
    late = farm.ledger.take(unwanted.episode_id, 1, "owner", lease_seconds=10)
    assert late is not None
    assert late.cancelled
    assert late.farm_tag == lease.farm_tag
    assert spec.episode_id != unwanted.episode_id


def test_tokens_never_repeat(farm: Farm) -> None:
    tokens = [leased(farm)[1].token for _ in range(5)]
    assert len(set(tokens)) == 5


def test_tokens_that_a_failover_forgot_do_not_repeat(farm: Farm, redis: Redis) -> None:
    before = [int(leased(farm)[1].token) for _ in range(5)]
    redis.set(Keys.TOKEN, before[0])  # a replica that had not seen the others
    wait_until(lambda: farm.ledger.now() * 1000 > before[-1] + 1, description="a failover takes time")
    assert int(leased(farm)[1].token) > before[-1]


@pytest.mark.parametrize("attempt", [0, 2])
def test_the_wrong_attempt_takes_nothing(farm: Farm, attempt: int) -> None:
    spec = a_spec()
    farm.ledger.open(spec)
    assert farm.ledger.take(spec.episode_id, attempt, "owner", lease_seconds=30) is None
    row = farm.ledger.row(spec.episode_id)
    assert row is not None
    assert row.state is EpisodeState.QUEUED


def test_an_episode_that_is_unknown_or_over_cannot_be_taken(farm: Farm) -> None:
    assert farm.ledger.take("e-nobody", 1, "owner", lease_seconds=30) is None
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec), lease.token)
    assert farm.ledger.take(spec.episode_id, 1, "owner", lease_seconds=30) is None


def test_renewal_prolongs_the_lease_and_fails_after_a_seizure(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm, lease_seconds=5)
    before = farm.ledger.lease_ends()[spec.episode_id]
    assert farm.ledger.renew(lease, lease_seconds=60)
    assert farm.ledger.lease_ends()[spec.episode_id] > before + 50
    expire(redis, spec.episode_id)
    assert farm.ledger.seize(spec.episode_id, "reconciler", lease_seconds=30)
    assert not farm.ledger.renew(lease, lease_seconds=60)


def test_a_lease_that_holds_cannot_be_seized(farm: Farm) -> None:
    spec, lease = leased(farm)
    assert farm.ledger.seize(spec.episode_id, "reconciler", lease_seconds=30) is None
    assert farm.ledger.renew(lease, lease_seconds=30)


def test_only_running_episodes_can_be_seized(farm: Farm) -> None:
    spec = a_spec()
    farm.ledger.open(spec)
    assert farm.ledger.seize(spec.episode_id, "reconciler", lease_seconds=30) is None
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec), lease.token)
    assert farm.ledger.seize(spec.episode_id, "reconciler", lease_seconds=30) is None


def test_seizing_again_after_a_lost_answer_gives_the_same_token(farm: Farm, redis: Redis) -> None:
    spec, _ = leased(farm)
    expire(redis, spec.episode_id)
    token = farm.ledger.seize(spec.episode_id, "reconciler-1", lease_seconds=30)
    assert token is not None
    assert farm.ledger.seize(spec.episode_id, "reconciler-1", lease_seconds=30) == token
    assert farm.ledger.seize(spec.episode_id, "reconciler-2", lease_seconds=30) is None


def test_a_seized_lease_cannot_write_a_receipt(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    expire(redis, spec.episode_id)
    token = farm.ledger.seize(spec.episode_id, "reconciler", lease_seconds=30)
    assert token is not None
    with pytest.raises(LeaseLost):
        farm.ledger.commit(a_receipt(spec, Outcome.SOLVED), lease.token)
    assert farm.ledger.receipt(spec.episode_id) is None
    farm.ledger.commit(a_receipt(spec, Outcome.WORKER_LOST), token)
    with pytest.raises(LeaseLost):
        farm.ledger.commit(a_receipt(spec, Outcome.SOLVED), lease.token)
    settled = farm.ledger.receipt(spec.episode_id)
    assert settled is not None
    assert settled.receipt.outcome is Outcome.WORKER_LOST


def test_a_lease_taken_by_nobody_else_may_still_write_when_it_is_late(farm: Farm, redis: Redis) -> None:
    """Tokens decide who may write, time only when somebody else may try."""
    spec, lease = leased(farm)
    expire(redis, spec.episode_id)
    farm.ledger.commit(a_receipt(spec), lease.token)
    assert farm.ledger.receipt(spec.episode_id) is not None


def test_a_receipt_is_written_once_with_its_counters(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    steps = (Operation(name="terminal", seconds=1.0), Operation(name="terminal", seconds=1.0))
    receipt = a_receipt(spec, Outcome.SOLVED, operations=steps)
    for _ in range(3):
        farm.ledger.commit(receipt, lease.token)
    assert redis.hgetall(Keys.COUNTERS) == {
        "episodes:solved": "1",
        "tool_calls:terminal:ok": "2",
        "tool_call:le:1": "2",
        "tool_call:sum": "2000000",
        "reward:le:1": "1",
        "reward:sum": "1000000",
        "episode_cost:le:0.0001": "1",
        "episode_cost:sum": "0",
    }
    assert redis.xlen(Keys.finished(spec.run_id)) == 1
    settled = farm.ledger.receipt(spec.episode_id)
    assert settled is not None
    assert settled.receipt == receipt


def test_another_receipt_of_the_same_owner_is_refused(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec), lease.token)
    with pytest.raises(LeaseLost):
        farm.ledger.commit(a_receipt(spec, Outcome.SOLVED), lease.token)
    counted = {"episodes:cancelled": "1", "episode_cost:le:0.0001": "1", "episode_cost:sum": "0"}
    assert redis.hgetall(Keys.COUNTERS) == counted


def test_an_episode_without_a_row_gets_no_receipt(farm: Farm) -> None:
    with pytest.raises(LeaseLost):
        farm.ledger.commit(a_receipt(a_spec()), "1")


def test_a_receipt_ends_row_and_lease(farm: Farm) -> None:
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec, Outcome.SOLVED), lease.token)
    row = farm.ledger.row(spec.episode_id)
    assert row is not None
    assert (row.state, row.outcome) == (EpisodeState.FINAL, Outcome.SOLVED)
    assert farm.ledger.open_episodes() == []
    assert farm.ledger.lease_ends() == {}


@pytest.mark.parametrize("outcome", [Outcome.SOLVED, Outcome.NOT_SUBMITTED])
def test_a_score_is_refused_while_an_allocation_is_unsettled(farm: Farm, redis: Redis, outcome: Outcome) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    with pytest.raises(FarmError):
        farm.ledger.commit(a_receipt(spec, outcome), lease.token)
    assert farm.ledger.receipt(spec.episode_id) is None
    assert redis.hgetall(Keys.COUNTERS) == {}
    farm.ledger.allocations.refused(row, lease.token, "nothing was made")
    farm.ledger.commit(a_receipt(spec, outcome), lease.token)


def test_an_aborted_episode_may_end_with_an_allocation_unsettled(farm: Farm) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT, allocations=(row.allocation_id,)), lease.token)
    settled = farm.ledger.receipt(spec.episode_id)
    assert settled is not None
    assert [r.state for r in settled.allocations] == [row.state]
    farm.ledger.allocations.refused(row, RECONCILER_TOKEN, "never made")


def test_what_is_over_expires_and_what_is_open_does_not(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    assert redis.ttl(Keys.episode(spec.episode_id)) == -1
    assert redis.ttl(Keys.allocation(row.allocation_id)) == -1
    farm.ledger.allocations.refused(row, lease.token, "nothing was made")
    farm.ledger.commit(a_receipt(spec), lease.token)
    for key in (Keys.episode(spec.episode_id), Keys.receipt(spec.episode_id), Keys.finished(spec.run_id)):
        assert RETENTION - 5 <= redis.ttl(key) <= RETENTION, key


def test_a_final_row_stays_until_its_last_allocation_is_settled(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    rows = [intended(farm, spec, lease, role) for role in (Role.POLICY, Role.VERIFIER)]
    farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    farm.ledger.allocations.refused(rows[0], RECONCILER_TOKEN, "never made")
    assert redis.ttl(Keys.episode(spec.episode_id)) == -1, "the other allocation could be settled by nobody"
    farm.ledger.allocations.refused(rows[1], RECONCILER_TOKEN, "never made")
    assert redis.ttl(Keys.episode(spec.episode_id)) > 0


def test_old_receipts_leave_the_list_at_retention(farm: Farm, redis: Redis) -> None:
    for key in (Keys.RECEIPTS, Keys.ENDS):
        redis.zadd(key, {"e-of-last-year": 1})
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec), lease.token)
    assert redis.zrange(Keys.RECEIPTS, 0, -1) == [spec.episode_id]


def test_the_permit_is_freed_with_the_receipt_when_nothing_is_left(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    assert admit(farm, spec.episode_id) is Admission.GRANTED
    row = intended(farm, spec, lease)
    farm.ledger.allocations.refused(row, lease.token, "nothing was made")
    assert redis.zcard(Keys.PERMITS) == 1, "the verifier inherits it"
    farm.ledger.commit(a_receipt(spec), lease.token)
    assert redis.zcard(Keys.PERMITS) == 0


def test_the_permit_is_held_until_the_last_unresolved_allocation_is_settled(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    rows = [intended(farm, spec, lease, role) for role in (Role.POLICY, Role.VERIFIER)]
    for row in rows:
        farm.ledger.allocations.created(row, f"sbx-{row.role}", lease.token, creating_ms=1)
        farm.ledger.allocations.unresolved(row, lease.token, "cannot be deleted")
    farm.ledger.commit(a_receipt(spec, Outcome.CLEANUP_UNRESOLVED), lease.token)
    assert redis.zcard(Keys.PERMITS) == 1
    farm.ledger.allocations.absent(rows[0], RECONCILER_TOKEN, running_ms=1)
    assert redis.zcard(Keys.PERMITS) == 1
    farm.ledger.allocations.absent(rows[1], RECONCILER_TOKEN, running_ms=1)
    assert redis.zcard(Keys.PERMITS) == 0


@pytest.mark.parametrize("settled_by", ["commit", "settlement"])
def test_whoever_waits_is_woken_when_the_permit_is_freed(farm: Farm, redis: Redis, settled_by: str) -> None:
    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    row = intended(farm, spec, lease)
    if settled_by == "settlement":
        farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    waiting, next_lease = leased(farm)
    thread = threading.Thread(target=admit, args=(farm, waiting.episode_id))
    thread.start()
    wait_until(lambda: redis.zscore(Keys.WAITERS, waiting.episode_id), description="a waiter in line")
    farm.ledger.allocations.refused(row, lease.token, "never made")
    if settled_by == "commit":
        farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    thread.join(2.5)  # a waiter that has to ask again by itself does so after 5 s
    assert redis.zscore(Keys.PERMITS, waiting.episode_id) is not None
    thread.join(10)
    farm.ledger.commit(a_receipt(waiting), next_lease.token)


def test_a_deferred_episode_is_queued_again_under_its_next_job(farm: Farm) -> None:
    spec, lease = leased(farm)
    assert farm.ledger.defer(lease)
    row = farm.ledger.row(spec.episode_id)
    assert row is not None
    assert (row.state, row.attempt, row.job_id) == (EpisodeState.QUEUED, 2, job_id(spec.episode_id, 2))
    assert farm.ledger.lease_ends() == {}
    with pytest.raises(LeaseLost):
        farm.ledger.commit(a_receipt(spec), lease.token)
    assert farm.ledger.take(spec.episode_id, 1, "owner", lease_seconds=30) is None
    assert farm.ledger.take(spec.episode_id, 2, "owner", lease_seconds=30) is not None


def test_deferring_again_after_a_lost_answer_changes_nothing(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    assert farm.ledger.defer(lease)
    before = redis.hgetall(Keys.episode(spec.episode_id))
    assert farm.ledger.defer(lease)
    assert redis.hgetall(Keys.episode(spec.episode_id)) == before
    assert farm.ledger.take(spec.episode_id, 2, "owner", lease_seconds=30) is not None
    assert not farm.ledger.defer(lease), "another slot runs it now"


def test_an_episode_with_an_allocation_or_of_another_owner_cannot_be_deferred(farm: Farm) -> None:
    spec, lease = leased(farm)
    assert not farm.ledger.defer(replace(lease, token="999"))
    row = intended(farm, spec, lease)
    assert not farm.ledger.defer(lease)
    farm.ledger.allocations.refused(row, lease.token, "never made")
    assert not farm.ledger.defer(lease)
    assert stored(farm, row.allocation_id).state == "refused"


def test_cancelling_marks_an_episode_and_makes_none(farm: Farm, redis: Redis) -> None:
    farm.ledger.cancel("e-nobody")
    assert not redis.exists(Keys.episode("e-nobody"))
    spec, _ = leased(farm)
    assert not farm.ledger.cancelled(spec.episode_id)
    farm.ledger.cancel(spec.episode_id)
    assert farm.ledger.cancelled(spec.episode_id)


def test_the_farm_tag_is_made_once(farm: Farm, redis_url: str) -> None:
    tag = farm.ledger.farm_tag()
    with opened_farm(redis_url) as other:
        assert other.ledger.farm_tag() == tag
    assert farm.ledger.farm_tag() == tag


def test_open_rows_are_those_without_a_receipt_oldest_first(farm: Farm) -> None:
    done, lease = leased(farm)
    farm.ledger.commit(a_receipt(done), lease.token)
    running, _ = leased(farm)
    started = farm.ledger.now()
    wait_until(lambda: farm.ledger.now() > started + 0.002, description="another millisecond")
    queued = a_spec()
    farm.ledger.open(queued)
    assert [(row.episode_id, row.state) for row in farm.ledger.open_rows()] == [
        (running.episode_id, EpisodeState.RUNNING),
        (queued.episode_id, EpisodeState.QUEUED),
    ]
