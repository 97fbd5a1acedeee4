"""An episode as its trainer drives it, through a real Redis to a slot without sandboxes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import groupby

import pytest
from redis import Redis

from orchestrator.episodes import Episode
from orchestrator.errors import (
    CommandTooLarge,
    EpisodeAborted,
    EpisodeClosed,
    FarmError,
    InfrastructureLost,
    ReceiptOverdue,
)
from orchestrator.finished import Finished
from orchestrator.keys import Keys
from orchestrator.mailbox import Mailbox, Result
from orchestrator.pool import Pool
from orchestrator.records import Script
from orchestrator.settings import Budgets, Settings
from orchestrator.vocabulary import EpisodeState, Outcome, job_id
from tests.support.bare_farm import TASK, TinySlot, a_receipt, farm_settings, leased, opened_farm
from tests.support.waiting import wait_until


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=4)


def test_an_episode_is_driven_from_here(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    assert episode.reset() == "ready"
    seen = episode.terminal("ls")
    assert seen == "ran ls"
    assert (seen.exit_code, seen.timed_out, seen.truncated, seen.binary) == (0, False, False, False)
    assert "closed" in episode.submit()
    assert episode.reward() == 1.0
    receipt = episode.receipt()
    assert receipt is not None
    assert receipt.outcome is Outcome.SOLVED


def test_every_command_is_executed_once_and_in_order(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    commands = [f"echo {number % 3}" for number in range(40)]
    assert [str(episode.terminal(command)) for command in commands] == [f"ran {command}" for command in commands]
    assert slot.commands == commands
    episode.close()


def test_a_failed_solve_is_a_reward_of_zero(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    episode.terminal("fail")
    episode.submit()
    assert episode.reward() == 0.0


def test_a_reward_without_a_submission_ends_the_episode_at_zero(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    episode.terminal("ls")
    assert episode.reward() == 0.0
    assert episode.wait().outcome is Outcome.NOT_SUBMITTED
    assert episode.reward() == 0.0


def test_a_reward_may_be_asked_for_before_anything_else(pool: Pool, slot: TinySlot) -> None:
    assert pool.submit(TASK).reward() == 0.0


def test_an_episode_that_runs_by_itself_has_its_reward_in_the_end(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK, policy=Script())
    assert episode.reward() == 1.0
    for call in (episode.reset, episode.submit, lambda: episode.terminal("ls")):
        with pytest.raises(FarmError):
            call()


def test_an_infrastructure_failure_is_raised_again_at_the_reward(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    with pytest.raises(InfrastructureLost) as lost:
        episode.terminal("lose")
    assert lost.value.outcome is Outcome.SANDBOX_LOST
    assert lost.value.detail == "the sandbox is gone"
    for call in (lambda: episode.terminal("ls"), episode.submit):
        with pytest.raises(InfrastructureLost):
            call()
    with pytest.raises(EpisodeAborted) as aborted:
        episode.reward()
    assert aborted.value.outcome is Outcome.SANDBOX_LOST
    assert "ls" not in slot.commands


def test_calls_after_a_scored_end_say_that_it_is_over(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    episode.submit()
    for call in (lambda: episode.terminal("ls"), episode.submit):
        with pytest.raises(EpisodeClosed):
            call()
    assert episode.reward() == 1.0


def test_closing_a_running_episode_cancels_it(pool: Pool, slot: TinySlot) -> None:
    with pool.submit(TASK) as episode:
        episode.terminal("ls")
        began = time.monotonic()
    assert episode.wait().outcome is Outcome.CANCELLED
    assert time.monotonic() - began < 2
    with pytest.raises(EpisodeAborted) as aborted:
        episode.reward()
    assert aborted.value.outcome is Outcome.CANCELLED


def test_closing_twice_or_after_the_end_changes_nothing(pool: Pool, slot: TinySlot) -> None:
    with pool.submit(TASK) as episode:
        episode.submit()
    episode.close()
    episode.cancel()
    assert episode.reward() == 1.0


def test_a_queued_episode_ends_at_once_when_it_is_cancelled(pool: Pool, redis: Redis) -> None:
    for episode in (pool.submit(TASK), pool.submit(TASK, policy=Script())):
        began = time.monotonic()
        episode.cancel()
        receipt = episode.receipt()
        assert receipt is not None
        assert (receipt.outcome, receipt.reward) == (Outcome.CANCELLED, None)
        assert time.monotonic() - began < 1
    assert redis.zcard(Keys.OPEN) == redis.zcard(Keys.LEASES) == 0


def test_whoever_waits_for_the_reset_of_an_episode_that_ended_is_told(pool: Pool) -> None:
    episode = pool.submit(TASK)
    episode.cancel()
    began = time.monotonic()
    for call in (episode.reset, lambda: episode.terminal("ls"), episode.submit):
        with pytest.raises(InfrastructureLost) as ended:
            call()
        assert ended.value.outcome is Outcome.CANCELLED
    assert time.monotonic() - began < 0.9, "nobody waited for an answer that cannot come"


def test_a_job_whose_episode_was_cancelled_is_not_run(pool: Pool, settings: Settings) -> None:
    cancelled = pool.submit(TASK)
    cancelled.cancel()
    last = pool.submit(TASK, policy=Script())
    with TinySlot(settings):
        last.wait(timeout_seconds=20)
    assert cancelled.wait().outcome is Outcome.CANCELLED
    row = pool.ledger.row(cancelled.episode_id)
    assert row is not None
    assert row.state is EpisodeState.FINAL


def test_cancelling_and_taking_at_once_ends_the_episode_once(pool: Pool, settings: Settings, redis: Redis) -> None:
    with TinySlot(settings):
        episodes = [pool.submit(TASK) for _ in range(30)]
        for episode in episodes:
            episode.cancel()
        outcomes = {episode.wait(timeout_seconds=20).outcome for episode in episodes}
    assert outcomes == {Outcome.CANCELLED}
    assert redis.xlen(Keys.finished("run-test")) == len(episodes)
    assert redis.hgetall(Keys.COUNTERS)["episodes:cancelled"] == str(len(episodes))


def test_a_command_over_the_limit_is_refused_and_the_episode_goes_on(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    limit = episode.spec.budgets.command_bytes
    with pytest.raises(CommandTooLarge, match=f"{limit}.*write a file"):
        episode.terminal("x" * (limit + 1))
    with pytest.raises(CommandTooLarge):
        episode.terminal("ü" * (limit // 2 + 1))
    assert episode.terminal("x" * limit).startswith("ran x")
    assert len(slot.commands) == 1
    episode.close()


def test_waiting_for_a_receipt_is_bounded_and_prompt(pool: Pool, redis_url: str) -> None:
    episode = pool.submit(TASK, policy=Script())
    with pytest.raises(FarmError, match=r"no receipt after 0.1 s.*rollout-farm status") as late:
        episode.wait(timeout_seconds=0.1)
    assert isinstance(late.value, TimeoutError)  # and so for callers that know only Python's
    ended: list[float] = []

    def wait() -> None:
        episode.wait(timeout_seconds=20)
        ended.append(time.monotonic())

    waiter = threading.Thread(target=wait)
    waiter.start()
    with opened_farm(redis_url) as farm:
        _, lease = leased(farm, episode.spec)
        began = time.monotonic()
        farm.ledger.commit(a_receipt(episode.spec, Outcome.SOLVED), lease.token)
    waiter.join(10)
    assert ended[0] - began < 3


def test_other_episodes_of_the_run_do_not_end_a_wait(pool: Pool, redis_url: str) -> None:
    mine = pool.submit(TASK, policy=Script())
    with opened_farm(redis_url) as farm:
        for _ in range(3):
            other, lease = leased(farm)
            farm.ledger.commit(a_receipt(other), lease.token)
        with pytest.raises(TimeoutError):
            mine.wait(timeout_seconds=0.1)
    mine.close()


def test_a_call_on_an_episode_that_ended_without_answering_it_says_how_it_ended(pool: Pool, redis_url: str) -> None:
    """Its slot died with the action in hand; the reconciler wrote the receipt."""
    episode = pool.submit(TASK)
    with opened_farm(redis_url) as farm:
        _, lease = leased(farm, episode.spec)
        mailbox = Mailbox(farm.redis, episode.episode_id)
        mailbox.finish(0, lease.token, Result(text="ready"))
        failures: list[BaseException] = []

        def drive() -> None:
            try:
                episode.terminal("ls")
            except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                failures.append(error)

        trainer = threading.Thread(target=drive)
        trainer.start()
        wait_until(lambda: mailbox.take(1, lease.token, 0.01), description="the action is in hand")
        farm.ledger.commit(a_receipt(episode.spec, Outcome.WORKER_LOST), lease.token)
        trainer.join(5)
    [failure] = failures
    assert isinstance(failure, InfrastructureLost)
    assert failure.outcome is Outcome.WORKER_LOST


def test_many_episodes_are_driven_side_by_side(pool: Pool, settings: Settings) -> None:
    with TinySlot(settings, "slot-a") as one, TinySlot(settings, "slot-b") as two:
        rewards: dict[str, float] = {}

        def drive(episode: Episode) -> None:
            with episode:
                for number in range(5):
                    assert episode.terminal(f"{episode.episode_id} {number}") == f"ran {episode.episode_id} {number}"
                episode.submit()
                rewards[episode.episode_id] = episode.reward()

        episodes = [pool.submit(TASK) for _ in range(6)]
        threads = [threading.Thread(target=drive, args=(episode,)) for episode in episodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert rewards == {episode.episode_id: 1.0 for episode in episodes}
    for commands in (one.commands, two.commands):
        order = [name for name, _ in groupby(command.split()[0] for command in commands)]
        assert len(order) == len(set(order)), "a slot runs one episode after another"
    assert len(one.commands) + len(two.commands) == 30


def test_threads_that_drive_one_episode_get_their_own_answers(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    episode.reset()
    answers: dict[int, str] = {}

    def call(number: int) -> None:
        answers[number] = str(episode.terminal(f"echo {number}"))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {number: f"ran echo {number}" for number in range(6)}
    episode.close()


def test_an_episode_that_redis_forgot_is_an_error_and_no_endless_wait(pool: Pool, redis: Redis) -> None:
    episode = pool.submit(TASK)
    redis.flushall()
    began = time.monotonic()
    with pytest.raises(FarmError, match="does not know"):
        episode.reset()
    with pytest.raises(FarmError, match="does not know"):
        episode.wait()
    assert time.monotonic() - began < 15


def test_a_command_that_is_no_text_is_a_clear_error(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    with pytest.raises(FarmError, match="UTF-8"):
        episode.terminal("\ud800")
    episode.close()


@pytest.fixture
def deserted(pool: Pool) -> Iterator[Episode]:
    """An episode whose slot took it and died, on a farm without an orchestrator; closing it may take 0.3 s."""
    budgets = Budgets(message_seconds=0.1, cleanup_seconds=0.05)
    spec = pool.submit(TASK).spec.model_copy(update={"budgets": budgets})
    lease = pool.ledger.take(spec.episode_id, 1, "owner-dead", lease_seconds=30)
    assert lease is not None
    mailbox = Mailbox(pool.redis, spec.episode_id)
    mailbox.finish(0, lease.token, Result(text="ready"))
    queue = pool._queue
    queue.forget(job_id(spec.episode_id, 1))
    yield Episode(spec, mailbox, pool.ledger, Finished(pool.redis, spec.run_id), queue, lease_lost_seconds=0.05)
    pool.ledger.commit(a_receipt(spec, Outcome.WORKER_LOST), lease.token)


OVERDUE = r"has no receipt after 0.3 s.*worker.*orchestrator.*rollout-farm status"


def test_closing_an_episode_that_nobody_can_end_is_bounded(deserted: Episode) -> None:
    for close in (deserted.close, deserted.close, deserted.wait):
        with pytest.raises(ReceiptOverdue, match=OVERDUE):
            close()


def test_a_call_on_its_way_ends_when_the_closing_is_overdue(deserted: Episode) -> None:
    """Or a thread that drives it would be waited for without end."""
    failures: list[BaseException] = []

    def drive() -> None:
        try:
            deserted.terminal("ls")
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            failures.append(error)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    wait_until(lambda: deserted._acting.locked(), description="the call is on its way")
    deserted.cancel()
    thread.join(10)
    [failure] = failures
    assert isinstance(failure, ReceiptOverdue)


def test_an_error_in_the_block_is_not_hidden_by_a_close_that_fails(
    deserted: Episode, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), deserted:
        1 / 0  # noqa: B018
    assert "not closed" in caplog.text
    with pytest.raises(ReceiptOverdue, match=OVERDUE), deserted:
        pass
