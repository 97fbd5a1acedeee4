"""What the trainer does, or no longer does, to an episode that runs: it dies, cancels, closes, stays silent."""

from __future__ import annotations

import time

import pytest

from orchestrator.errors import EpisodeAborted, EpisodeClosed, InfrastructureLost
from orchestrator.keys import Keys
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field, Running, open_field
from tests.support.ground import BUDGETS, Ground
from tests.support.policies import candidate, repaired, script
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.farm"]

BOTH = ("policy", "verifier")


def test_a_trainer_without_a_heartbeat_loses_its_episode(field: Field, running: Running) -> None:
    episode = running.episode
    field.farm.redis.delete(Keys.trainer("trainer-test"))
    running.end()
    field.check_ended(episode.episode_id, Outcome.TRAINER_LOST)
    with pytest.raises(EpisodeAborted):
        episode.reward()


def test_a_heartbeat_that_a_step_of_the_clock_ended_is_waited_for(field: Field, running: Running) -> None:
    """Redis's clock went forward by more than a heartbeat lasts: the trainer lives, and its next beat says so."""
    field.farm.redis.delete(Keys.trainer("trainer-test"))
    running.episode.terminal("sleep 1.5")  # the slot has looked by then
    assert running.episode.receipt() is None
    field.farm.presence.beat_trainer("trainer-test")
    running.episode.submit()
    running.end()
    field.check_ended(running.episode.episode_id, Outcome.WRONG_ANSWER, roles=BOTH)


def test_nothing_is_created_for_a_trainer_whose_heartbeat_is_missing(field: Field) -> None:
    spec = field.spec()
    assert field.run(spec) == Outcome.TRAINER_LOST
    field.check_ended(spec.episode_id, Outcome.TRAINER_LOST, roles=())


def test_an_episode_taken_between_two_heartbeats_begins_with_the_next(field: Field) -> None:
    running = field.remote(field.spec(), trainer_alive=False)
    episode_id = running.episode.episode_id
    wait_until(lambda: field.farm.ledger.row(episode_id).state == "running", description="it is taken")  # type: ignore[union-attr]
    time.sleep(0.3)
    assert field.farm.redis.zscore(Keys.PERMITS, episode_id) is None, "no permit before the heartbeat"
    field.farm.presence.beat_trainer("trainer-test")
    running.episode.submit()
    running.end()
    field.check_ended(episode_id, Outcome.WRONG_ANSWER, roles=BOTH)


def test_an_episode_cancelled_before_it_was_taken_makes_no_sandbox(field: Field) -> None:
    spec = field.spec(script(candidate(repaired())))
    field.farm.ledger.open(spec)
    field.farm.ledger.cancel(spec.episode_id)
    assert field.run(spec) == Outcome.CANCELLED
    field.check_ended(spec.episode_id, Outcome.CANCELLED, roles=())
    assert field.farm.ledger.allocation_ids(spec.episode_id) == ()


def test_closing_before_a_submission_cancels(field: Field, running: Running) -> None:
    running.episode.close()
    running.end()
    field.check_ended(running.episode.episode_id, Outcome.CANCELLED)
    running.episode.close()  # once more changes nothing
    with pytest.raises(InfrastructureLost):
        running.episode.terminal("true")


def test_closing_after_the_end_changes_nothing(field: Field, running: Running) -> None:
    with running.episode as episode:
        episode.terminal(candidate(repaired()))
        episode.submit()
        before = episode.receipt()
    assert episode.receipt() == before
    assert episode.reward() == 1.0
    with pytest.raises(EpisodeClosed):
        episode.terminal("true")
    field.check_ended(episode.episode_id, Outcome.SOLVED, roles=BOTH)


def test_a_remote_window_ends_by_itself_without_a_call(field: Field) -> None:
    spec = field.spec(budgets=BUDGETS.model_copy(update={"policy_window_seconds": 0.8}))
    started = field.remote(spec)
    started.end()
    field.check_ended(spec.episode_id, Outcome.WINDOW_EXHAUSTED)
    assert started.episode.reward() == 0.0


def test_a_remote_deadline_ends_by_itself_without_a_call(field: Field) -> None:
    spec = field.spec(budgets=BUDGETS.model_copy(update={"deadline_seconds": 2.5, "policy_window_seconds": 30}))
    started = field.remote(spec)
    started.episode.reset()
    started.end()
    field.check_ended(spec.episode_id, Outcome.DEADLINE)


def test_a_late_owner_writes_nothing_once_its_lease_was_seized(ground: Ground) -> None:
    with open_field(ground, lease_renew_seconds=0.2) as field:
        running = field.remote(field.spec())
        running.episode.reset()
        ledger, episode_id = field.farm.ledger, running.episode.episode_id

        def seize() -> str | None:
            field.farm.redis.zadd(Keys.LEASES, {episode_id: 1}, xx=True)  # as if it had not been renewed
            return ledger.seize(episode_id, "reconciler-test", lease_seconds=60)

        wait_until(seize, description="the lease is seized")
        running.thread.join(20)
        assert [type(error).__name__ for error in running.failures] == ["LeaseLost"]
        assert ledger.receipt(episode_id) is None
        assert field.running(episode_id) == []  # it deleted what was its own
