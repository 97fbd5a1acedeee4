"""The trainer's side over a real Redis: nothing submitted is lost, batches are whole, whoever waits is told."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deploy.embedded import EmbeddedRedis
from orchestrator.episodes import Episode
from orchestrator.errors import (
    CommandRefused,
    EpisodeAborted,
    FarmError,
    ReceiptOverdue,
    RedisUnavailable,
)
from orchestrator.farm import open_farm
from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.records import Script
from orchestrator.settings import Settings
from orchestrator.vocabulary import Drive, EpisodeState, Outcome
from tests.support.bare_farm import TASK, TinySlot, beat_slots, farm_settings
from tests.support.waiting import wait_until

SCRIPT = Script(commands=("true",))


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=4)


def test_a_submitted_episode_is_open_and_queued_before_submit_returns(pool: Pool, redis: Redis) -> None:
    episode = pool.submit(TASK, policy=SCRIPT, group_id="g-1")
    row = pool.ledger.row(episode.episode_id)
    assert row is not None
    assert row.state is EpisodeState.QUEUED
    assert (row.spec.run_id, row.spec.group_id, row.spec.drive) == ("run-test", "g-1", Drive.AUTONOMOUS)
    assert redis.llen("rq:queue:episodes") == 1
    assert pool.submitted == [episode.episode_id]


def test_submitting_the_same_id_again_is_the_same_episode(pool: Pool, redis: Redis) -> None:
    for _ in range(3):
        assert pool.submit(TASK, policy=SCRIPT, episode_id="e-mine").episode_id == "e-mine"
    assert redis.llen("rq:queue:episodes") == 1
    assert pool.submitted == ["e-mine"]


def test_threads_that_submit_the_same_id_get_the_same_handle(pool: Pool, redis: Redis) -> None:
    start = threading.Barrier(8)

    def submit(_: int) -> Episode:
        start.wait(10)
        return pool.submit(TASK, policy=SCRIPT, episode_id="e-mine")

    with ThreadPoolExecutor(8) as threads:
        handles = list(threads.map(submit, range(8)))
    assert len({id(handle) for handle in handles}) == 1
    assert redis.llen("rq:queue:episodes") == 1
    assert pool.submitted == ["e-mine"]


def test_episodes_are_waited_for_while_other_threads_submit_and_forget(pool: Pool) -> None:
    kept = [pool.submit(TASK, policy=SCRIPT) for _ in range(200)]
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            pool.forget(kept[0])
            pool.submit(TASK, policy=SCRIPT, episode_id=kept[0].episode_id)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            churning = threads.submit(churn)
            try:
                for _ in range(200):
                    with pytest.raises(ReceiptOverdue):
                        next(pool.as_completed(timeout_seconds=0.0001))
            finally:
                over.set()
            churning.result(30)
    finally:
        sys.setswitchinterval(usual)


def test_capacity_is_what_could_be_admitted_now(pool: Pool, slot: TinySlot) -> None:
    assert (pool.capacity().live_slots, pool.capacity().concurrency_limit, pool.capacity().free) == (1, 4, 1)


def test_receipts_come_as_episodes_end(pool: Pool, slot: TinySlot) -> None:
    episodes = [pool.submit(TASK, policy=SCRIPT) for _ in range(5)]
    receipts = [settled.receipt for settled in pool.as_completed(timeout_seconds=20)]
    assert sorted(receipt.episode_id for receipt in receipts) == sorted(pool.submitted)
    assert all(receipt.outcome is Outcome.SOLVED for receipt in receipts)
    again = [settled.receipt for settled in pool.as_completed(episodes[:2], timeout_seconds=20)]
    assert [receipt.episode_id for receipt in again] == [episode.episode_id for episode in episodes[:2]]


def test_receipts_are_given_in_the_order_asked_for(pool: Pool, slot: TinySlot) -> None:
    episodes = [pool.submit(TASK, policy=SCRIPT) for _ in range(4)]
    asked = list(reversed(episodes))
    assert [settled.receipt.episode_id for settled in pool.receipts(asked)] == [e.episode_id for e in asked]


def test_waiting_for_nothing_ends_at_once(pool: Pool) -> None:
    assert list(pool.as_completed([])) == []
    assert list(pool.as_completed()) == []


def test_when_nothing_ends_as_completed_says_so_in_time(pool: Pool) -> None:
    episode = pool.submit(TASK, policy=SCRIPT)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=episode.episode_id):
        list(pool.as_completed(timeout_seconds=0.2))
    assert time.monotonic() - began < 2
    episode.close()


def test_whoever_waits_may_look_after_the_farm_and_give_up(pool: Pool) -> None:
    def check() -> None:
        raise LookupError("the farm's worker has ended")

    episode = pool.submit(TASK, policy=SCRIPT)
    with pytest.raises(LookupError):
        list(pool.as_completed(timeout_seconds=0.2, check=check))
    episode.close()


def test_who_is_unknown_is_found_among_any_number(pool: Pool, slot: TinySlot) -> None:
    ended, last = (pool.submit(TASK, policy=SCRIPT) for _ in range(2))
    pool.receipts([ended, last])
    names = [ended.episode_id, *(f"e-{number}" for number in range(1500)), last.episode_id]
    assert pool.ledger.forgotten(names) == names[1:-1]
    assert pool.ledger.forgotten([]) == []


def test_two_trainers_on_one_farm_see_their_own_runs(pool: Pool, slot: TinySlot, settings: Settings) -> None:
    with Pool(settings) as other:
        theirs = other.submit(TASK, policy=SCRIPT)
        mine = pool.submit(TASK, policy=SCRIPT)
        assert [s.receipt.episode_id for s in pool.as_completed(timeout_seconds=20)] == [mine.episode_id]
        assert [s.receipt.episode_id for s in other.as_completed(timeout_seconds=20)] == [theirs.episode_id]
        assert other.run_id != pool.run_id


# batches


@pytest.mark.parametrize("seconds", ["x", float("nan"), [1], True])
def test_a_time_that_is_none_is_refused_before_anything_is_waited_for(pool: Pool, seconds: Any) -> None:
    episode = pool.submit(TASK)
    calls: list[Callable[[], object]] = [
        lambda: pool.reserve(1, wait_seconds=seconds),
        lambda: next(pool.as_completed(timeout_seconds=seconds)),
        lambda: pool.cancel(wait_seconds=seconds),
        lambda: episode.wait(timeout_seconds=seconds),
    ]
    for call in calls:
        with pytest.raises(FarmError, match=r"_seconds is a number of seconds.* got .*: give a float"):
            call()
    assert episode.receipt() is None
    episode.close()


def test_what_is_of_another_kind_is_refused_with_what_to_give(pool: Pool) -> None:
    wrong: dict[str, Any] = {"episode_id": ["e-1"], "reservation": "reservation-1", "budgets": {"command_seconds": 1}}
    for name, value in wrong.items():
        with pytest.raises(FarmError, match=f"{name} takes a .*, got .*: give "):
            pool.submit(TASK, **{name: value})
    episode = pool.submit(TASK)
    for call in (pool.receipts, lambda one: next(pool.as_completed(one))):
        with pytest.raises(FarmError, match="got Episode: give a list of episodes"):
            call(cast(Any, episode))
    with pytest.raises(CommandRefused, match="has to be text, got 5"):
        episode.terminal(cast(Any, 5))
    episode.close()


# heartbeat


@pytest.mark.parametrize("interrupted", ["ledger.open", "_queue.enqueue"])
def test_a_submission_that_is_interrupted_leaves_no_episode(
    redis_url: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """Ctrl-C anywhere in it: nobody has a handle, and a sandbox would be made after the command has ended."""
    part, name = interrupted.split(".")
    with pytest.raises(KeyboardInterrupt), Pool(settings) as pool:  # noqa: PT012
        whole = getattr(getattr(pool, part), name)

        def interrupt(*args: Any, **options: Any) -> None:
            whole(*args, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(getattr(pool, part), name, interrupt)
        pool.submit(TASK, episode_id="e-halfway")
    receipt = pool.ledger.receipt("e-halfway")
    assert receipt is not None
    assert receipt.receipt.outcome is Outcome.CANCELLED
    assert pool.ledger.open_episodes() == []


def test_a_trainer_with_remote_episodes_beats_until_it_closes(redis_url: str, redis: Redis) -> None:
    settings = farm_settings(redis_url, trainer_beat_seconds=0.05, trainer_lost_seconds=0.8)
    pool = Pool(settings)
    key = Keys.trainer(pool.trainer_id)
    assert not redis.exists(key), "nothing is driven from here yet"
    pool.submit(TASK)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 1.1 or not redis.exists(key), description="longer than a key lives")
    assert redis.exists(key)
    pool.close()
    wait_until(lambda: not redis.exists(key), seconds=2, description="the heartbeat is gone")


def test_when_the_trainers_heartbeat_stops_its_episode_ends(settings: Settings, redis: Redis, slot: TinySlot) -> None:
    pool = Pool(settings)
    episode = pool.submit(TASK)
    episode.reset()
    redis.delete(Keys.trainer(pool.trainer_id))  # as if no beat had come for long; the next is seconds away
    assert episode.wait(timeout_seconds=10).outcome is Outcome.TRAINER_LOST
    with pytest.raises(EpisodeAborted):
        episode.reward()
    pool.close()


def test_closing_cancels_what_is_driven_from_here_and_leaves_the_rest(settings: Settings) -> None:
    pool = Pool(settings)
    remote, autonomous = pool.submit(TASK), pool.submit(TASK, policy=SCRIPT)
    pool.close()
    pool.close()
    receipt = remote.receipt()
    assert receipt is not None
    assert receipt.outcome is Outcome.CANCELLED
    assert autonomous.receipt() is None
    autonomous.close()


def test_closing_a_pool_ends_its_running_episodes(settings: Settings, slot: TinySlot) -> None:
    with Pool(settings) as pool:
        episode = pool.submit(TASK)
        episode.reset()
    assert episode.wait(timeout_seconds=10).outcome is Outcome.CANCELLED


def test_a_closed_pool_leaves_no_thread(settings: Settings) -> None:
    with Pool(settings) as pool:
        pool.submit(TASK)
        assert "trainer-heartbeat" in [thread.name for thread in threading.enumerate()]
    assert "trainer-heartbeat" not in [thread.name for thread in threading.enumerate()]


# a Redis that is not there


def expect_unavailable(url: str | None, within: float = 10.0) -> str:
    began = time.monotonic()
    with pytest.raises(RedisUnavailable) as refused:
        Pool(Settings(_env_file=None, redis_url=url))  # type: ignore[call-arg]
    assert time.monotonic() - began < within
    return str(refused.value)


def test_a_redis_that_is_not_there_is_said_at_once_with_what_to_do(tmp_path: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"redis://127.0.0.1:{port}/0", f"unix://{tmp_path}/nobody.sock", "redis://no-such-host.invalid/0"):
        text = expect_unavailable(url)
        assert "REDIS_URL" in text
        assert "start one" in text


def test_a_redis_that_never_answers_is_given_up_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        expect_unavailable(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")


@pytest.mark.parametrize("url", [None, "", "http://127.0.0.1", "nonsense", "redis://127.0.0.1:port/0"])
def test_no_redis_url_or_a_wrong_one_is_said(url: str | None) -> None:
    assert "REDIS_URL" in expect_unavailable(url)


def test_the_password_of_a_redis_is_not_shown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "hunter2" not in expect_unavailable(f"redis://user:hunter2@127.0.0.1:{port}/0")


def test_an_episode_of_another_run_is_waited_for_as_well(pool: Pool, slot: TinySlot, settings: Settings) -> None:
    pool.submit(TASK, policy=SCRIPT, episode_id="e-shared").wait(20)
    with Pool(settings, run_id="run-other") as other:
        episode = other.submit(TASK, policy=SCRIPT, episode_id="e-shared")
        assert [row.receipt.run_id for row in other.as_completed([episode], timeout_seconds=20)] == ["run-test"]


def test_a_redis_that_goes_away_is_a_typed_error(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", appendfsync="no") as server:
        with Pool(farm_settings(server.url)) as pool:
            episode = pool.submit(TASK, policy=SCRIPT)
            beat_slots(open_farm(pool.settings), 1)
            reserved = pool.reserve(1)
            completed = pool.as_completed()
            pool.redis.set_retry(Retry(NoBackoff(), 0))
            server.kill()
            for call in (pool.capacity, episode.receipt, episode.wait, lambda: next(completed), reserved.release):
                with pytest.raises(RedisUnavailable):
                    call()
            server.start()


def test_an_episode_that_the_farm_knows_no_longer_is_not_waited_for(pool: Pool, redis: Redis) -> None:
    episode = pool.submit(TASK, policy=SCRIPT)
    redis.flushdb()
    with pytest.raises(FarmError, match=episode.episode_id):
        next(pool.as_completed([episode]))


def test_a_reset_has_time_for_a_slow_creation(pool: Pool) -> None:
    budgets = pool.settings.budgets.model_copy(update={"create_request_seconds": 40.0})
    assert pool.submit(TASK, policy=SCRIPT, budgets=budgets).spec.budgets.message_seconds == 55
    pool.cancel()


def test_budgets_that_would_have_to_grow_past_their_bound_are_refused(pool: Pool, redis: Redis) -> None:
    budgets = pool.settings.budgets.model_copy(update={"verifier_command_seconds": 3_550.0})
    with pytest.raises(FarmError, match="verifier_lifetime_seconds"):
        pool.submit(TASK, policy=SCRIPT, budgets=budgets)
    assert pool.ledger.open_episodes() == []


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ("weekly-sales", r"load_builtin\('weekly-sales'\)"),
        ("mine.jsonl", r"load_tasks\('mine.jsonl'\)"),
        ({"id": "mine"}, "parse_task"),
        (None, "load_builtin"),
    ],
)
def test_what_is_no_task_is_refused_with_the_way_to_one(pool: Pool, given: Any, way: str) -> None:
    with pytest.raises(FarmError, match=f"pass a Task: .*{way}"):
        pool.submit(given)
    assert pool.ledger.open_episodes() == []


@pytest.mark.parametrize("run_id", ["Bad Run", "", "é", "r" * 65, "run-1\n", 5])
def test_a_run_that_cannot_be_is_refused_before_anything_is_written(
    settings: Settings, redis: Redis, run_id: Any
) -> None:
    with pytest.raises(FarmError, match="1 to 64 of a-z, 0-9 and '-'"):
        Pool(settings, run_id=run_id, budget_usd=1)
    assert redis.dbsize() == 0
