"""Ending episodes on request: queued ones at once, running ones by their slot, each with one receipt and no sandbox."""

from __future__ import annotations

import threading
from typing import cast

import pytest
from redis import Redis

from orchestrator.cancellation import Cancellation, Ending
from orchestrator.endings import end_queued
from orchestrator.errors import FarmError
from orchestrator.farm import Farm
from orchestrator.finished import START, Finished
from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.records import EpisodeSpec, Script
from orchestrator.rows import EpisodeRow
from orchestrator.settings import Settings
from orchestrator.vocabulary import AllocationState, EpisodeState, Outcome, job_id
from tests.support.bare_farm import (
    TASK,
    TinySlot,
    a_receipt,
    a_spec,
    farm_of,
    farm_settings,
    intended,
    leased,
)
from tests.support.line import PROMPT_SECONDS, Waiter, running
from tests.support.waiting import wait_until

SCRIPT = Script(commands=("true",))
WAIT_SECONDS = 20.0


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=1)


@pytest.fixture
def cancellation(farm: Farm) -> Cancellation:
    return Cancellation(farm)


def queued(farm: Farm, **changes: str) -> EpisodeSpec:
    """An episode that waits in the queue."""
    spec = a_spec(**changes)
    farm.ledger.open(spec)
    farm.queue.enqueue(spec)
    return spec


def outcome(farm: Farm, spec: EpisodeSpec) -> Outcome | None:
    settled = farm.ledger.receipt(spec.episode_id)
    return settled.receipt.outcome if settled else None


def test_queued_episodes_end_at_once_with_one_receipt_and_leave_the_queue(
    farm: Farm, cancellation: Cancellation, redis: Redis
) -> None:
    ours = [queued(farm) for _ in range(5)]
    other = queued(farm, run_id="run-other")
    named = cancellation.open_of(run_id="run-test")
    assert sorted(named) == sorted(spec.episode_id for spec in ours)  # within one millisecond they have no order
    cancellation.ask(named)
    assert [outcome(farm, spec) for spec in ours] == [Outcome.CANCELLED] * 5
    assert cancellation.wait(named, 0) == Ending(outcomes={"cancelled": 5})
    assert outcome(farm, other) is None
    assert farm.queue.waiting() == {job_id(other.episode_id, 1)}
    assert len(Finished(redis, "run-test").after(START, 1)) == 5
    assert redis.hget(Keys.COUNTERS, "episodes:cancelled") == "5"
    cancellation.ask(named)  # once more changes nothing
    assert redis.hget(Keys.COUNTERS, "episodes:cancelled") == "5"


def test_an_episode_that_its_trainer_closes_leaves_the_queue_too(farm: Farm, pool: Pool) -> None:
    closed, kept = pool.submit(TASK), pool.submit(TASK)
    closed.close()
    assert farm.queue.waiting() == {job_id(kept.episode_id, 1)}
    pool.cancel()
    assert farm.queue.depth() == 0
    details = [episode.wait().detail for episode in (closed, kept)]
    assert details == ["cancelled before it was taken"] * 2, "one text for one end"


def test_an_unreadable_row_is_ended_with_its_run(farm: Farm, cancellation: Cancellation, redis: Redis) -> None:
    first, broken, last = (queued(farm) for _ in range(3))
    redis.hset(Keys.episode(broken.episode_id), "spec", '{"schema_version": 99}')
    cancellation.ask(cancellation.open_of(run_id="run-test"))
    assert [outcome(farm, spec) for spec in (first, broken, last)] == [Outcome.CANCELLED] * 3
    assert farm.queue.depth() == 0


def test_one_that_cannot_be_ended_keeps_no_other_waiting(farm: Farm, cancellation: Cancellation, redis: Redis) -> None:
    first, broken, last = (queued(farm) for _ in range(3))
    redis.hset(Keys.episode(broken.episode_id), "run", "NOT AN ID")
    named = [spec.episode_id for spec in (first, broken, last)]
    cancellation.ask(named)
    assert cancellation.wait(named, 0) == Ending(outcomes={"cancelled": 2}, open=(broken.episode_id,))


def test_a_group_is_cancelled_alone_and_within_a_run_when_that_is_said(farm: Farm, cancellation: Cancellation) -> None:
    first = queued(farm, run_id="run-a", group_id="g-1")
    second = queued(farm, run_id="run-b", group_id="g-1")
    third = queued(farm, run_id="run-a", group_id="g-2")
    assert cancellation.open_of(group_id="g-1") == [second.episode_id, first.episode_id]
    assert cancellation.open_of(run_id="run-a", group_id="g-1") == [first.episode_id]
    cancellation.ask(cancellation.open_of(group_id="g-1"))
    assert [outcome(farm, spec) for spec in (first, second, third)] == [Outcome.CANCELLED, Outcome.CANCELLED, None]


def test_what_nobody_knows_is_a_clear_error_and_what_has_ended_is_not(farm: Farm, cancellation: Cancellation) -> None:
    with pytest.raises(FarmError, match="no run 'run-nobody'"):
        cancellation.open_of(run_id="run-nobody")
    with pytest.raises(FarmError, match="nothing is open in group 'g-nobody'"):
        cancellation.open_of(group_id="g-nobody")
    with pytest.raises(FarmError, match="no episode 'e-nobody'"):
        cancellation.known(["e-nobody"])
    done, lease = leased(farm, a_spec(group_id="g-done"))
    farm.ledger.commit(a_receipt(done, Outcome.SOLVED, group_id="g-done"), lease.token)
    assert cancellation.open_of(run_id="run-test") == []
    assert cancellation.open_of(group_id="g-done") == []
    assert cancellation.open_of(run_id="run-test", group_id="g-done") == []
    with pytest.raises(FarmError, match="nothing is open in group 'g-done'"):
        cancellation.open_of(run_id="run-other", group_id="g-done")
    assert cancellation.known([done.episode_id, done.episode_id]) == [done.episode_id]
    cancellation.ask([done.episode_id])
    assert cancellation.wait([done.episode_id], 0) == Ending(outcomes={"solved": 1})
    assert not farm.ledger.cancelled(done.episode_id)


def test_a_running_episode_is_ended_by_its_slot(pool: Pool, slot: TinySlot) -> None:
    with pool.submit(TASK, group_id="g-1") as episode:
        episode.reset()
        ending = pool.cancel(group_id="g-1")
        assert ending == Ending(outcomes={"cancelled": 1})
        receipt = episode.receipt()
        assert receipt is not None
        assert receipt.outcome is Outcome.CANCELLED


def test_a_pool_cancels_its_run_and_no_other(pool: Pool, settings: Settings) -> None:
    with Pool(settings, run_id="run-other") as other:
        theirs = other.submit(TASK, policy=SCRIPT)
        ours = [pool.submit(TASK, policy=SCRIPT) for _ in range(3)]
        assert pool.cancel() == Ending(outcomes={"cancelled": 3})
        assert [episode.wait(1).outcome for episode in ours] == [Outcome.CANCELLED] * 3
        assert theirs.receipt() is None
        assert other.cancel().complete
        assert pool.cancel() == Ending()
    other.redis.close()


def test_an_episode_in_line_for_a_permit_is_woken_for_its_end(farm: Farm, cancellation: Cancellation) -> None:
    holder, lease = running(farm)
    cancelled, named = threading.Event(), list[str]()

    def check() -> None:
        if any(farm.ledger.cancelled(episode) for episode in named):
            cancelled.set()

    waiter = Waiter(farm, check=check)
    waiter.wait_in_line()
    named.append(waiter.episode_id)
    cancellation.ask(named)
    assert cancelled.wait(PROMPT_SECONDS), "it would have looked again after five seconds"
    farm.ledger.commit(a_receipt(holder), lease.token)
    waiter.end()


def test_what_does_not_end_in_time_is_named(farm: Farm, cancellation: Cancellation) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.created(row, "sbx", lease.token, creating_ms=1)
    cancellation.ask([spec.episode_id])
    assert farm.ledger.cancelled(spec.episode_id)
    assert cancellation.wait([spec.episode_id], 0.3) == Ending(open=(spec.episode_id,))
    farm.ledger.allocations.unresolved(row, lease.token, "cannot be deleted now")
    farm.ledger.commit(a_receipt(spec, allocations=(row.allocation_id,)), lease.token)
    ending = cancellation.wait([spec.episode_id], 0.3)
    assert ending == Ending(outcomes={"cancelled": 1}, unsettled=(row.allocation_id,))
    assert not ending.complete
    farm.ledger.allocations.absent(row.model_copy(update={"state": AllocationState.UNRESOLVED}), "*", running_ms=1)
    assert cancellation.wait([spec.episode_id], 0) == Ending(outcomes={"cancelled": 1})


def test_waiting_ends_with_the_last_receipt(farm: Farm, cancellation: Cancellation) -> None:
    spec, lease = leased(farm)
    cancellation.ask([spec.episode_id])
    endings: list[Ending] = []
    thread = threading.Thread(target=lambda: endings.append(cancellation.wait([spec.episode_id], WAIT_SECONDS)))
    thread.start()
    assert endings == []
    farm.ledger.commit(a_receipt(spec), lease.token)
    thread.join(WAIT_SECONDS / 2)
    assert endings == [Ending(outcomes={"cancelled": 1})]


def test_cancelling_while_slots_take_ends_every_episode_once(settings: Settings, redis: Redis) -> None:
    with farm_of(settings) as farm, Pool(settings, run_id="run-test") as pool:
        episodes = [pool.submit(TASK, policy=SCRIPT) for _ in range(60)]
        with TinySlot(settings, "slot-a"):
            wait_until(lambda: redis.zcard(Keys.RECEIPTS), description="the slot has begun")
            ending = Cancellation(farm).wait([e.episode_id for e in episodes], 0)
            ending = pool.cancel(wait_seconds=WAIT_SECONDS)
            assert ending.complete
        assert len(Finished(redis, "run-test").after(START, 1)) == 60
        counters = cast("dict[str, str]", redis.hgetall(Keys.COUNTERS)).items()
        counts = {name: int(count) for name, count in counters if name.startswith("episodes:")}
        assert sum(counts.values()) == 60
        assert counts["episodes:cancelled"] > 0
        assert farm.queue.depth() == 0
    pool.redis.close()


def test_an_episode_whose_canceller_died_half_way_is_ended_by_the_next(farm: Farm, cancellation: Cancellation) -> None:
    spec = queued(farm)
    farm.ledger.cancel(spec.episode_id)
    assert outcome(farm, spec) is None
    cancellation.ask([spec.episode_id])
    assert outcome(farm, spec) is Outcome.CANCELLED


def test_a_row_that_was_taken_is_not_ended_from_outside(farm: Farm) -> None:
    spec = queued(farm)
    row = farm.ledger.row(spec.episode_id)
    assert isinstance(row, EpisodeRow)
    _, lease = leased(farm, spec)
    assert not end_queued(farm.ledger, farm.queue, row, Outcome.CANCELLED)
    assert outcome(farm, spec) is None
    now = farm.ledger.row(spec.episode_id)
    assert now is not None
    assert now.state is EpisodeState.RUNNING
    farm.ledger.commit(a_receipt(spec), lease.token)
