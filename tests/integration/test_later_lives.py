"""The same episode id again, once its receipt has come to its end: a new episode that meets nothing of the old one."""

from __future__ import annotations

import pytest
from redis import Redis

from orchestrator.allocations import RECONCILER_TOKEN
from orchestrator.errors import FarmError
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.mailbox import PARTS, RESET_NUMBER, Action, Mailbox, Result
from orchestrator.pool import Pool
from orchestrator.records import EpisodeSpec
from orchestrator.rows import Lease
from orchestrator.settings import Settings
from orchestrator.transcripts import Transcript, read_transcript
from orchestrator.vocabulary import AllocationState, Outcome, Role, allocation_id, job_id
from tests.support.bare_farm import (
    TASK,
    TinySlot,
    a_receipt,
    a_request,
    a_spec,
    ended_unresolved,
    farm_settings,
    intended,
    leased,
    stored,
)


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=4, receipt_retention_seconds=60)


def end_retention(redis: Redis, episode_id: str) -> None:
    """Let the time of an episode's receipt be over, and of what is kept for as long."""
    redis.delete(Keys.receipt(episode_id), Keys.episode(episode_id))


def lived(farm: Farm, redis: Redis, spec: EpisodeSpec) -> Lease:
    """An episode's first life: an action, a transcript, a settled sandbox, a receipt whose time is over by now."""
    _, lease = leased(farm, spec)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.created(row, "sandbox-1", lease.token, creating_ms=0)
    mailbox = Mailbox(redis, spec.episode_id)
    mailbox.finish(RESET_NUMBER, lease.token, Result(text="ready, once"))
    mailbox.post(1, Action(name="terminal", command="ls"))
    mailbox.take(1, lease.token, 1)
    mailbox.finish(1, lease.token, Result(text="of the first life"))
    transcript = Transcript(redis, spec.episode_id, limit_bytes=1000, retention_seconds=60)
    transcript.add("terminal", "ls")
    transcript.flush()
    farm.ledger.allocations.absent(row, lease.token, running_ms=10)
    farm.ledger.commit(a_receipt(spec, Outcome.SOLVED, allocations=(row.allocation_id,)), lease.token)
    end_retention(redis, spec.episode_id)
    return lease


def retaken(farm: Farm, spec: EpisodeSpec) -> Lease:
    """The lease of a slot that takes the episode's second life."""
    assert farm.ledger.open(spec)
    row = farm.ledger.row(spec.episode_id)
    assert row is not None
    lease = farm.ledger.take(spec.episode_id, row.attempt, "owner-of-the-second", lease_seconds=30)
    assert lease is not None
    return lease


def test_a_later_life_is_driven_like_a_first_one(settings: Settings, slot: TinySlot, redis: Redis) -> None:
    for command in ("echo one", "echo two"):
        with Pool(settings, run_id="run-test") as pool:
            episode = pool.submit(TASK, episode_id="e-same")
            assert episode.reset() == "ready"
            assert episode.terminal(command) == f"ran {command}"
            episode.submit()
            assert episode.reward() == 1.0
        end_retention(redis, "e-same")
    assert slot.commands == ["echo one", "echo two"]


def test_a_later_life_finds_no_mailbox_and_no_transcript(farm: Farm, redis: Redis) -> None:
    spec = a_spec()
    lived(farm, redis, spec)
    kept = [Keys.transcript(spec.episode_id), Keys.mailbox(spec.episode_id, "results")]
    assert redis.exists(*kept) == len(kept), "what this test is about"
    assert farm.ledger.open(spec)
    assert redis.exists(*(Keys.mailbox(spec.episode_id, part) for part in PARTS)) == 0
    assert read_transcript(redis, spec.episode_id) == []


def test_opening_again_takes_nothing_from_a_life_that_goes_on(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    mailbox = Mailbox(redis, spec.episode_id)
    mailbox.finish(RESET_NUMBER, lease.token, Result(text="ready"))
    assert not farm.ledger.open(spec)
    assert mailbox.result(RESET_NUMBER) == Result(text="ready")


def test_the_sandboxes_of_a_later_life_have_ids_of_their_own(farm: Farm, redis: Redis) -> None:
    """The provider would answer a creation under the old id with the sandbox that is gone."""
    spec = a_spec()
    lived(farm, redis, spec)
    lease = retaken(farm, spec)
    assert lease.attempt == 2
    name = allocation_id(spec.episode_id, lease.attempt, Role.POLICY)
    request = a_request(spec, attempt=lease.attempt)
    for _ in range(2):  # the second time as after a lost answer
        farm.ledger.allocations.intend(spec.episode_id, Role.POLICY, request, lease.token)
    assert farm.ledger.allocation_ids(spec.episode_id) == (name,)
    assert [row.allocation_id for row in farm.ledger.allocations.unsettled()] == [name]
    row = farm.ledger.row(spec.episode_id)
    assert row is not None
    assert row.unsettled == 1
    assert stored(farm, allocation_id(spec.episode_id, 1, Role.POLICY)).state is AllocationState.ABSENT
    farm.ledger.allocations.refused(stored(farm, name), lease.token, "so that nothing is left")


def test_an_intent_under_the_id_of_an_earlier_sandbox_is_refused(farm: Farm, redis: Redis) -> None:
    """It would be neither listed nor counted, and its sandbox in no cost: taken for an orphan."""
    spec = a_spec()
    lived(farm, redis, spec)
    lease = retaken(farm, spec)
    with pytest.raises(FarmError, match="went by this id already"):
        farm.ledger.allocations.intend(spec.episode_id, Role.POLICY, a_request(spec), lease.token)
    assert farm.ledger.allocation_ids(spec.episode_id) == ()


def test_an_attempt_is_remembered_for_longer_than_what_it_left(farm: Farm, redis: Redis) -> None:
    spec = a_spec()
    lived(farm, redis, spec)
    left = [key for key in redis.scan_iter(f"*{spec.episode_id}*") if key != Keys.attempt(spec.episode_id)]
    assert len(left) > 3
    assert redis.ttl(Keys.attempt(spec.episode_id)) > max(map(redis.ttl, left))


def test_a_third_life_begins_above_the_second(farm: Farm, redis: Redis) -> None:
    spec = a_spec()
    lived(farm, redis, spec)
    lease = retaken(farm, spec)
    farm.ledger.commit(a_receipt(spec, attempt=lease.attempt), lease.token)
    end_retention(redis, spec.episode_id)
    assert retaken(farm, spec).attempt == 3


def test_an_earlier_life_is_settled_before_the_next_begins(farm: Farm, redis: Redis) -> None:
    """However long that takes: the row stands for its sandbox, and the attempt is remembered from then."""
    row, _ = ended_unresolved(farm)
    redis.delete(Keys.receipt(row.episode_id), Keys.attempt(row.episode_id))
    assert not farm.ledger.open(a_spec(episode_id=row.episode_id))
    farm.ledger.allocations.absent(row, RECONCILER_TOKEN, running_ms=10)
    assert redis.ttl(Keys.attempt(row.episode_id)) > redis.ttl(Keys.allocation(row.allocation_id))
    end_retention(redis, row.episode_id)
    assert retaken(farm, a_spec(episode_id=row.episode_id)).attempt == 2


def test_the_job_of_a_later_life_is_its_own_and_goes_to_the_front_when_reserved(farm: Farm, redis: Redis) -> None:
    """RQ keeps the first life's envelope for ten minutes, and would take the same id for the same job."""
    other, again = a_spec(), a_spec(reservation_id="reservation-1")
    lived(farm, redis, again)
    for spec in (other, again):
        farm.ledger.open(spec)
        farm.queue.enqueue(spec)
    assert farm.queue.rq.get_job_ids() == [job_id(again.episode_id, 2), job_id(other.episode_id, 1)]
