"""The reconciler's rounds: one leads; time in which nobody looked on or Redis was away is held against no lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from redis import Redis

from orchestrator import leadership
from orchestrator import rounds as rounds_module
from orchestrator.keys import Keys
from orchestrator.leadership import leader
from orchestrator.provider import SandboxRow
from orchestrator.reconciler import Report
from orchestrator.rounds import run_rounds
from orchestrator.vocabulary import EpisodeState, Outcome
from tests.support.bare_farm import a_receipt, leased, opened_farm
from tests.support.fake_provider import FakeProvider
from tests.support.reconcilers import LEASE_SECONDS, reconciler_of
from tests.support.scene import Scene
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.scene"]


def test_no_lease_is_judged_within_one_lease_time_after_an_interruption(scene: Scene) -> None:
    spec, _, sandbox_id = scene.started()
    scene.kill(spec)
    scene.reconciler.interrupted()
    assert scene.round() == Report()
    scene.pass_time(LEASE_SECONDS - 1)
    assert scene.round() == Report()
    assert sandbox_id in scene.provider.running
    scene.pass_time(1.1)
    assert scene.round().finished == [spec.episode_id]


def test_an_outage_that_the_client_rode_out_is_an_interruption_too(scene: Scene) -> None:
    spec, _, _ = scene.started()
    scene.kill(spec)
    scene.hang(LEASE_SECONDS)  # one call that hung in retries for so long
    assert scene.round() == Report()
    scene.pass_time(LEASE_SECONDS + 1)
    assert scene.round().finished == [spec.episode_id]


def test_a_new_reconciler_judges_nothing_within_its_first_lease_time(scene: Scene) -> None:
    spec, _, _ = scene.started()
    scene.kill(spec)
    young = scene.watcher("young")
    assert young.run_once() == Report()
    scene.pass_time(LEASE_SECONDS + 0.1)
    assert young.run_once().finished == [spec.episode_id]


@contextmanager
def rounds_of(scene: Scene, *, every_seconds: float) -> Iterator[list[Report]]:
    """A reconciler whose leases last 0.4 s makes its rounds; the reports so far."""
    reports: list[Report] = []
    reconciler = scene.watcher("slow", lease_seconds=0.4)
    stop = threading.Event()
    options: dict[str, Any] = {"every_seconds": every_seconds, "stop": stop, "on_report": reports.append}
    thread = threading.Thread(target=run_rounds, args=(scene.farm.redis, reconciler, "slow"), kwargs=options)
    thread.start()
    try:
        yield reports
    finally:
        stop.set()
        thread.join(10)


def test_a_rest_longer_than_a_lease_is_no_outage(scene: Scene) -> None:
    spec, _, _ = scene.started()
    scene.kill(spec)
    with rounds_of(scene, every_seconds=0.6):
        wait_until(lambda: scene.farm.ledger.receipt(spec.episode_id), description="the lost episode's receipt")
    assert scene.receipt(spec).outcome is Outcome.WORKER_LOST


def test_the_lead_is_kept_during_a_rest(scene: Scene, redis: Redis) -> None:
    with rounds_of(scene, every_seconds=600) as reports:
        wait_until(lambda: reports, description="the first round")
        redis.delete(Keys.RECONCILER)  # as if it had run out
        wait_until(lambda: leader(redis) == "slow", description="it leads on")
        assert len(reports) == 1


def test_an_outage_during_a_rest_is_an_interruption_too(scene: Scene) -> None:
    spec, _, _ = scene.started()
    scene.kill(spec)
    scene.pass_time(6)
    scene.hang(9)
    scene.reconciler.beat()
    assert scene.round() == Report(), "before the last beat Redis was away"
    scene.pass_time(LEASE_SECONDS + 1)
    assert scene.round().finished == [spec.episode_id]


def test_one_reconciler_leads_at_a_time_and_hands_over(scene: Scene, redis_url: str, redis: Redis) -> None:
    spec, lease = leased(scene.farm, lease_seconds=60)
    reports: dict[str, list[Report]] = {"a": [], "b": []}
    stops = {name: threading.Event() for name in reports}

    def rounds(name: str) -> None:
        with opened_farm(redis_url) as farm:
            reconciler = reconciler_of(farm, FakeProvider(), name, lease_seconds=0.1)
            run_rounds(
                farm.redis, reconciler, name, every_seconds=0.02, stop=stops[name], on_report=reports[name].append
            )

    threads = {name: threading.Thread(target=rounds, args=(name,)) for name in reports}
    for thread in threads.values():
        thread.start()
    wait_until(lambda: len(reports["a"]) + len(reports["b"]) > 5, description="a few rounds")
    first, second = ("a", "b") if reports["a"] else ("b", "a")
    assert reports[second] == []
    assert 0 < redis.pttl(Keys.RECONCILER) <= 10_000
    stops[first].set()
    threads[first].join(10)
    wait_until(lambda: reports[second], seconds=5, description="the other leads")
    stops[second].set()
    threads[second].join(10)
    assert redis.get(Keys.RECONCILER) is None
    row = scene.farm.ledger.row(spec.episode_id)
    assert row is not None
    assert row.state is EpisodeState.RUNNING
    scene.farm.ledger.commit(a_receipt(spec), lease.token)


def test_it_is_noted_when_a_whole_round_ended_and_not_when_the_lead_was_lost(scene: Scene) -> None:
    unresolved = scene.farm.ledger.unresolved
    spec, _, _ = scene.started()
    scene.kill(spec)
    scene.reconciler.interrupted()
    assert unresolved.reconciled_at() is None
    scene.round()
    first = unresolved.reconciled_at()
    assert first is not None
    assert abs(first - scene.ledger.now()) < 5
    scene.pass_time(LEASE_SECONDS + 1)
    assert scene.reconciler.run_once(leading=lambda: False).finished == []
    assert unresolved.reconciled_at() == first, "it stopped half-way"
    assert scene.round().finished == [spec.episode_id]
    assert (unresolved.reconciled_at() or 0) > first


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_slow_list_of_the_provider_is_no_outage_of_redis(scene: Scene, share: float) -> None:
    """Only that a killed worker's episodes are finished later by as much."""

    class SlowList(FakeProvider):
        def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
            scene.hang(share * LEASE_SECONDS)
            return super().list(metadata)

    slow = scene.watcher("slow", SlowList(), sweep_seconds=LEASE_SECONDS)
    scene.pass_time(LEASE_SECONDS + 1)
    spec, _, _ = scene.started()
    assert slow.run_once().finished == []
    scene.kill(spec)
    began, finished = scene.passed, list[str]()
    while not finished and scene.passed - began < 4 * LEASE_SECONDS:
        finished = slow.run_once().finished
        scene.pass_time(1)
    assert finished == [spec.episode_id]


def test_a_round_that_lasts_longer_than_the_lead_keeps_it(
    scene: Scene, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider's list may take long; two who take the lead from each other each time never trust what they see."""
    monkeypatch.setattr(leadership, "LEAD_SECONDS", 0.4)
    monkeypatch.setattr(rounds_module, "LEAD_SECONDS", 0.4)
    scene.farm.ledger.farm_tag()

    class SlowList(FakeProvider):
        def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
            time.sleep(1.2)
            return super().list(metadata)

    reports: dict[str, list[Report]] = {"a": [], "b": []}
    stop = threading.Event()

    def rounds(name: str) -> None:
        with opened_farm(redis_url) as farm:
            reconciler = reconciler_of(farm, SlowList(), name, sweep_seconds=0)
            run_rounds(farm.redis, reconciler, name, every_seconds=0.05, stop=stop, on_report=reports[name].append)

    threads = [threading.Thread(target=rounds, args=(name,)) for name in reports]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(reports["a"]) + len(reports["b"]) >= 3, seconds=20, description="three rounds")
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert [] in (reports["a"], reports["b"]), "one of them led all along"
