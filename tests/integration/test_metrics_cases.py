"""Where counting goes wrong elsewhere: exceptions, rejects, restarts, and label sets that are gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.web_server import serving
from orchestrator.errors import ConcurrencyLimited, RateLimited
from orchestrator.farm import Farm
from orchestrator.limiter import Admission
from orchestrator.pool import Pool
from orchestrator.presence import WorkerRow
from orchestrator.provider import CreateRequest, Sandbox
from orchestrator.vocabulary import Outcome, job_id
from orchestrator.web import create_app
from tests.support.bare_farm import a_receipt, a_spec, admit, beat_slots, expire, farm_of, farm_settings, leased
from tests.support.creators import create
from tests.support.farm import Field
from tests.support.ground import KEY
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.reconcilers import LEASE_SECONDS, reconciler_of
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider

pytest_plugins = ["tests.support.farm"]


def scrape(farm: Farm) -> dict[str, float]:
    """Every sample, by name and labels as Prometheus writes them."""
    with serving(create_app(farm), "127.0.0.1", 0) as url:
        text = httpx.get(f"{url}/metrics", timeout=10).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{s.name}{{{','.join(f'{k}={v}' for k, v in s.labels.items())}}}": s.value for s in samples}


def ended(found: Mapping[str, float]) -> dict[str, float]:
    """Outcome -> episodes, without those that are nought."""
    start = "farm_episodes_total{outcome="
    return {name.removeprefix(start)[:-1]: n for name, n in found.items() if name.startswith(start) and n}


class Bursting(E2BProvider):
    """A provider with a bug of ours: the verifier's creation ends with an exception that nobody expects."""

    def create(self, request: CreateRequest) -> Sandbox:
        """Never."""
        raise ZeroDivisionError(request.allocation_id)


def test_an_episode_that_ends_by_an_exception_is_counted_once_with_its_receipt(field: Field) -> None:
    spec = field.spec(script(candidate(repaired())))
    with pytest.raises(ZeroDivisionError):
        field.run(spec, provider=Bursting(KEY, api_url=field.ground.sandboxes.url))
    before = scrape(field.farm)
    assert field.farm.ledger.receipt(spec.episode_id) is None
    assert ended(before) == {}, "neither receipt nor count"
    expire(field.farm.redis, spec.episode_id)
    reconciler = reconciler_of(field.farm, field.provider, lease_seconds=0.1)

    def finished() -> bool:
        reconciler.run_once()
        return field.farm.ledger.receipt(spec.episode_id) is not None

    wait_until(finished, seconds=LEASE_SECONDS + 10, description="the reconciler finishes it")
    assert ended(scrape(field.farm)) == {field.receipt(spec.episode_id).receipt.outcome: 1}
    reconciler.run_once()
    assert sum(ended(scrape(field.farm)).values()) == 1


def test_depth_saturation_and_rejects_are_visible(redis_url: str) -> None:
    with farm_of(farm_settings(redis_url, concurrency_limit=2)) as farm:
        beat_slots(farm, 4)
        admitted = [leased(farm)[0].episode_id for _ in range(2)]
        assert [admit(farm, episode_id) for episode_id in admitted] == [Admission.GRANTED] * 2
        for _ in range(3):
            waiting = a_spec()
            farm.ledger.open(waiting)
            farm.queue.enqueue(waiting)
        refused, lease = leased(farm)
        farm.ledger.commit(a_receipt(refused, Outcome.ADMISSION_TIMEOUT), lease.token)
        assert not farm.limiter.ask_places("r1", 2, life_seconds=30, stays=True)
        full = scrape(farm)
        farm.limiter.leave("2:r1")
        creations = [create(farm, episode_id) for episode_id in admitted]
        creations[0].refused(RateLimited("too fast", retry_after_seconds=30))
        creations[1].refused(ConcurrencyLimited("too many"))
        farm.limiter.note(RateLimited("too fast", retry_after_seconds=30))
        found = scrape(farm)
    assert full["farm_queue_episodes{queue=episodes}"] == 3
    assert (full["farm_waiting_batch_places{}"], found["farm_waiting_batch_places{}"]) == (2, 0)
    assert full["farm_slots{state=busy}"] == full["farm_concurrency_limit{kind=effective}"] == 2
    assert found["farm_concurrency_limit{kind=effective}"] == 1
    assert found["farm_rate_limited_total{kind=rate}"] == 1, (
        "the one that answered another call paused creations, and is none of them"
    )
    assert found["farm_rate_limited_total{kind=concurrency}"] == 1
    assert 0 < found["farm_cooldown_seconds{}"] <= 30
    assert ended(found) == {"admission_timeout": 1}


def test_a_workers_death_and_restart_reset_no_counter(field: Field) -> None:
    first = field.worker("w1")
    with Pool(field.settings) as pool:
        assert pool.submit(weekly_sales(), policy=script(candidate(repaired()))).wait(30).outcome is Outcome.SOLVED
        before = scrape(field.farm)
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: not first.alive(), description="it is gone with its children")
        field.worker("w2")
        after = scrape(field.farm)
        counters = {name for name in before if name.split("{")[0].endswith(("_total", "_count", "_sum", "_bucket"))}
        assert {name: after[name] for name in counters} == {name: before[name] for name in counters}
        assert pool.submit(weekly_sales(), policy=script("true")).wait(30).outcome is Outcome.WRONG_ANSWER
    assert ended(scrape(field.farm)) == {"solved": 1, "wrong_answer": 1}


def test_a_label_set_that_is_gone_leaves_no_ghost(redis_url: str) -> None:
    with farm_of(farm_settings(redis_url, queue="first")) as farm:
        farm.budget.set("2")
        found = scrape(farm)
        assert found["farm_budget_usd{kind=limit}"] == 2
        farm.budget.set(None)
        assert "farm_budget_usd{kind=limit}" not in scrape(farm)
        assert "farm_queue_episodes{queue=first}" in found
        spec = a_spec()
        farm.queue.named("third").enqueue(spec)
        assert scrape(farm)["farm_queue_episodes{queue=third}"] == 1
        farm.queue.named("third").withdraw(job_id(spec.episode_id, 1))
        assert "farm_queue_episodes{queue=third}" not in scrape(farm), "nobody serves it, nothing waits in it"
        farm.presence.beat_worker(WorkerRow("worker-3", "here", 1, "running", 2, "-", "third"), ["worker-3-1"])
        assert scrape(farm)["farm_queue_episodes{queue=third}"] == 0
        farm.presence.remove_worker("worker-3", ["worker-3-1"])
    with farm_of(farm_settings(redis_url, queue="second")) as farm:
        queues = [name for name in scrape(farm) if name.startswith("farm_queue_episodes")]
    assert queues == ["farm_queue_episodes{queue=second}"]
