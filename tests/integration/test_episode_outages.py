"""Calls of a trainer that fail on their way to Redis or back: nothing is carried out twice, no answer is another's."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from orchestrator.episodes import Episode
from orchestrator.errors import EpisodeAborted, RedisUnavailable
from orchestrator.finished import Finished
from orchestrator.mailbox import Action, Mailbox, Result
from orchestrator.pool import Pool
from orchestrator.settings import Settings
from tests.support.bare_farm import TASK, TinySlot, farm_settings
from tests.support.waiting import wait_until


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=4)


class BreakingMailbox(Mailbox):
    """A mailbox whose connection breaks when told to: before the action has arrived, after that, or while waiting."""

    breaks = ""

    def post(self, number: int, action: Action) -> Result | None:
        """Post; the action or the answer may get lost."""
        if self.breaks == "before":
            raise RedisConnectionError("nothing was sent")
        posted = super().post(number, action)
        if self.breaks == "after":
            raise RedisConnectionError("the answer was lost")
        return posted

    def wait(self, number: int, seconds: float) -> Result:
        """Wait; the connection may break meanwhile."""
        if self.breaks == "waiting":
            raise RedisConnectionError("gone")
        return super().wait(number, seconds)


def breaking(pool: Pool, slot: TinySlot) -> tuple[Episode, BreakingMailbox]:
    """An episode, and the mailbox by which it is driven."""
    spec = pool.submit(TASK).spec
    mailbox = BreakingMailbox(pool.redis, spec.episode_id)
    finished = Finished(pool.redis, spec.run_id)
    return Episode(spec, mailbox, pool.ledger, finished, slot.farm.queue, lease_lost_seconds=12), mailbox


@pytest.mark.parametrize("moment", ["before", "after", "waiting"])
def test_a_call_that_failed_and_is_made_again_is_carried_out_once(pool: Pool, slot: TinySlot, moment: str) -> None:
    episode, mailbox = breaking(pool, slot)
    for call, answer in ((lambda: episode.terminal("count"), "ran count"), (episode.submit, "Submitted")):
        mailbox.breaks = moment
        for _ in range(2):
            with pytest.raises(RedisUnavailable, match="ask again"):
                call()
        mailbox.breaks = ""
        assert call().startswith(answer)
    assert slot.commands == ["count"]
    assert episode.reward() == 1.0


def test_the_same_command_is_carried_out_again_once_it_was_answered(pool: Pool, slot: TinySlot) -> None:
    episode = pool.submit(TASK)
    assert [episode.terminal("count") for _ in range(2)] == ["ran count"] * 2
    assert slot.commands == ["count", "count"]
    episode.close()


def test_after_a_failed_call_no_answer_is_read_as_anothers(pool: Pool, slot: TinySlot) -> None:
    episode, mailbox = breaking(pool, slot)
    assert episode.terminal("first") == "ran first"
    mailbox.breaks = "after"
    with pytest.raises(RedisUnavailable):
        episode.terminal("second")
    mailbox.breaks = ""
    wait_until(lambda: "second" in slot.commands, description="the command had arrived")
    assert episode.terminal("third") == "ran third"
    assert slot.commands == ["first", "second", "third"]
    episode.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_after_a_failed_cancel_the_calls_say_that_it_was_cancelled(pool: Pool, slot: TinySlot, moment: str) -> None:
    episode, mailbox = breaking(pool, slot)
    assert episode.terminal("first") == "ran first"
    mailbox.breaks = moment
    with suppress(RedisUnavailable):  # it is none where the slot has seen the asked end already
        episode.cancel()
    mailbox.breaks = ""
    with pytest.raises(EpisodeAborted, match="cancelled"):
        episode.reward()
    assert slot.commands == ["first"]


def test_of_several_threads_one_waits_for_the_sandbox(pool: Pool, settings: Settings, redis: Redis) -> None:
    episode = pool.submit(TASK)

    def waiting() -> int:
        return sum(row["cmd"] == "blpop" for row in redis.client_list())

    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(episode.terminal, "count") for _ in range(3)]
        wait_until(waiting, description="the sandbox is waited for")
        for _ in range(50):
            assert waiting() <= 1
            time.sleep(0.01)
        with TinySlot(settings):
            assert [call.result(20) for call in calls] == ["ran count"] * 3
            episode.close()
