"""Telling a worker to stop: once drains, twice closes, and a Ctrl-C of the terminal leaves nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from redis import Redis
from rq import Queue
from rq.exceptions import StopRequested
from rq.worker import WorkerStatus

from orchestrator.pool import Pool
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.waiting import wait_until
from workers.slot import SlotWorker

pytest_plugins = ["tests.support.farm"]


@pytest.fixture
def pool(field: Field) -> Iterator[Pool]:
    with Pool(field.settings) as opened:
        yield opened


def test_a_stop_signal_whose_exception_was_swallowed_still_stops_an_idle_slot(redis_url: str) -> None:
    """RQ raises in the handler; where the signal finds the slot in a log handler, that swallows whatever is raised."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Redis.from_url(redis_url) as redis:
        slot = SlotWorker([Queue("episodes", connection=redis)], name="w1-1", connection=redis)
        slot.heartbeat()
        try:
            with suppress(StopRequested):
                slot.request_stop(signal.SIGTERM, None)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        slot.set_state(WorkerStatus.BUSY)
        slot.heartbeat()
        slot.set_state(WorkerStatus.IDLE)
        with pytest.raises(StopRequested):
            slot.heartbeat()


def test_an_idle_slot_is_whole_again_for_rqs_tools_after_an_outage_that_outlived_its_row(redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        slot = SlotWorker([Queue("episodes", connection=redis)], name="w1-1", connection=redis)
        slot.register_birth()  # type: ignore[no-untyped-call]
        redis.delete(slot.key, "rq:workers", "rq:workers:episodes")
        slot.heartbeat()
        [seen] = SlotWorker.all(connection=redis)
        assert (seen.name, seen.queue_names(), seen.hostname) == ("w1-1", ["episodes"], slot.hostname)
        slot.register_death()  # type: ignore[no-untyped-call]


def test_sigterm_lets_running_episodes_finish_and_takes_no_new_one(field: Field, pool: Pool) -> None:
    worker = field.worker()
    slow = script("sleep 1.9", candidate(repaired()))
    running = [pool.submit(weekly_sales(), policy=slow) for _ in range(2)]
    for episode in running:
        field.policy_sandbox(episode.episode_id)
    waiting = pool.submit(weekly_sales(), policy=script())
    worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: [row.state for row in field.farm.presence.workers()] == ["draining"], description="it says so")
    assert field.farm.limiter.capacity().live_slots == 0
    assert worker.wait(30) == 0, worker.stderr
    assert worker.alive() == []
    for episode in running:
        field.check_ended(episode.episode_id, Outcome.SOLVED, roles=("policy", "verifier"))
    assert waiting.receipt() is None
    assert field.events(waiting.episode_id) == []
    assert field.farm.presence.workers() == []
    assert field.farm.limiter.capacity().live_slots == 0
    waiting.close()
    field.check_ended(waiting.episode_id, Outcome.CANCELLED, roles=())


def test_a_second_sigterm_closes_what_runs(field: Field, pool: Pool) -> None:
    worker = field.worker()
    remote = pool.submit(weekly_sales())
    remote.reset()
    scripted = pool.submit(weekly_sales(), policy=script(*["sleep 1"] * 25))
    field.policy_sandbox(scripted.episode_id)
    worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: [row.state for row in field.farm.presence.workers()] == ["draining"], description="it drains")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait(15) == 0, worker.stderr
    assert worker.alive() == []
    for episode in (remote, scripted):
        field.check_ended(episode.episode_id, Outcome.CANCELLED)


def test_a_drain_that_takes_too_long_closes_by_itself_and_ctrl_c_leaves_nothing(ground: Ground) -> None:
    with open_field(ground, drain_seconds=0.5) as field, Pool(field.settings) as pool:
        worker, idle = field.start_worker("w1"), field.start_worker("w2")
        worker.wait_ready()
        idle.wait_ready()
        episode = pool.submit(weekly_sales())
        episode.reset()
        for each in (worker, idle):
            each.interrupt_group()
        for each in (worker, idle):
            assert each.wait(15) == 0, each.stderr
            assert each.alive() == []
            assert "Traceback" not in each.stderr
        field.check_ended(episode.episode_id, Outcome.CANCELLED)
