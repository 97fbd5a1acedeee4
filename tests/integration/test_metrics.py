"""Metrics equal the receipts: of real episodes, whoever is asked, and say so when Redis is away."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.embedded import EmbeddedRedis
from deploy.web_server import serving
from orchestrator.cost import usd
from orchestrator.counts import counts_of
from orchestrator.errors import OutcomeUnknown, SettingsError
from orchestrator.farm import Farm, open_farm
from orchestrator.keys import Keys
from orchestrator.metrics import read
from orchestrator.unresolved import Kind
from orchestrator.vocabulary import AllocationState, Outcome, Phase, Role
from orchestrator.web import create_app
from tests.support import warm
from tests.support.bare_farm import (
    a_receipt,
    a_spec,
    admit,
    beat_slots,
    ended_unresolved,
    farm_of,
    farm_settings,
    intended,
    leased,
)
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.metrics import Series, check_equal, scrape, series
from tests.support.policies import candidate, repaired, script
from tests.support.processes import ROOT, Marked, worker_environment
from tests.support.programs import program
from tests.support.redis_processes import RedisProcess
from tests.support.scene import Scene
from tests.support.slow_port import slow_port
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.farm", "tests.support.scene"]


def value(found: Series, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.fixture(scope="module")
def lasting(ground: Ground) -> Iterator[Field]:
    """A farm whose episodes have ended in five ways."""
    with open_field(ground, own_database=True) as field:
        field.run(field.spec(script(candidate(repaired()), "cat nothing", "echo seen")))
        field.run(field.spec(script("echo hello")))
        field.run(field.spec(script("rm report.py")))
        field.run(field.spec(script(candidate("raise SystemExit(3)"))))
        field.run(field.spec(script(), template="no-such-template"))
        yield field


def test_metrics_equal_the_receipts_of_real_episodes(lasting: Field) -> None:
    found = series(scrape(lasting.farm))
    check_equal(lasting.farm, found)
    assert value(found, "farm_episodes_total", outcome="setup_failed") == 1
    assert value(found, "farm_tool_calls_total", tool="terminal", result="failed") == 1
    assert value(found, "farm_episodes_total", outcome="artifact_missing") == 1
    assert value(found, "farm_episode_reward_bucket", le="0.0") == 3
    assert value(found, "farm_cost_usd_total", role="policy") > 0


def test_every_orchestrator_says_the_same(lasting: Field) -> None:
    first, second = (scrape(open_farm(lasting.settings, patient=False)) for _ in range(2))
    assert first == second


def test_every_name_of_the_design_is_there_and_none_carries_an_id(lasting: Field) -> None:
    text = scrape(lasting.farm)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counters = {"episodes", "sandboxes_created", "rate_limited", "cleanups", "orphans", "tool_calls"}
    counters |= {"sandbox_seconds", "cost_usd"}
    gauges = {"queue_episodes", "slots", "workers", "sandboxes", "concurrency_limit", "creation_rate_limit"}
    gauges |= {"cooldown_seconds", "unresolved_allocations", "burn_usd_per_hour", "budget_usd", "redis_up"}
    gauges |= {"reconciled_timestamp_seconds", "not_settled", "waiting_batch_places"}
    histograms = {"episode_phase_seconds", "tool_call_seconds", "episode_reward", "episode_cost_usd"}
    for kind, names in (("counter", counters), ("gauge", gauges), ("histogram", histograms)):
        assert {name for name, family in families.items() if family.type == kind} == {f"farm_{name}" for name in names}
    assert all(family.documentation.endswith(".") for family in families.values())
    given = {(name, v) for family in families.values() for s in family.samples for name, v in s.labels.items()}
    labels = {"outcome", "role", "kind", "result", "tool", "queue", "state", "phase", "le"}
    assert {name for name, _ in given} <= labels
    known = {*map(str, Outcome), *map(str, Role), *map(str, AllocationState), *map(str, Phase)}
    known |= {"rate", "concurrency", "terminal", "submit", "ok", "failed", "timed_out", "lost", lasting.settings.queue}
    known |= {"busy", "idle", "configured", "effective", "spent", "reserved", *map(str, Kind)}
    assert {v for name, v in given if name != "le"} <= known


def test_promtool_has_nothing_to_say_about_the_metrics_of_real_episodes(lasting: Field) -> None:
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=scrape(lasting.farm),
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_what_goes_on_now_is_seen(redis_url: str) -> None:
    with farm_of(farm_settings(redis_url, concurrency_limit=5, creation_rate=2)) as farm:
        beat_slots(farm, 4)
        queued = a_spec()
        farm.ledger.open(queued)
        farm.queue.enqueue(queued)
        farm.queue.named("another").enqueue(a_spec())
        running, lease = leased(farm)
        admit(farm, running.episode_id)
        policy, verifier = (intended(farm, running, lease, role) for role in Role)
        farm.ledger.allocations.created(policy, "sandbox-1", lease.token, creating_ms=10)
        farm.ledger.allocations.sized(policy, vcpus=2, memory_mb=512)
        farm.ledger.allocations.unknown(verifier, lease.token, "its answer was lost")
        found = series(scrape(farm))
    assert value(found, "farm_queue_episodes", queue="episodes") == 1
    assert value(found, "farm_queue_episodes", queue="another") == 1, "its settings do not name that one"
    assert (value(found, "farm_slots", state="busy"), value(found, "farm_slots", state="idle")) == (1, 3)
    assert value(found, "farm_workers") == 1
    assert value(found, "farm_sandboxes", role="policy", state="created") == 1
    assert value(found, "farm_sandboxes", role="verifier", state="unknown") == 1
    assert value(found, "farm_unresolved_allocations") == 1
    assert value(found, "farm_burn_usd_per_hour") == float(3600 * (2 * Decimal("0.000014") + Decimal("0.00000225")))
    assert value(found, "farm_concurrency_limit", kind="configured") == 5
    assert value(found, "farm_creation_rate_limit", kind="effective") == 2
    assert value(found, "farm_redis_up") == 1
    assert value(found, "farm_reconciled_timestamp_seconds") == 0


def test_what_reconcilers_cannot_settle_is_counted_until_it_is(scene: Scene) -> None:
    spec, _, sandbox_id = scene.started()
    stray = scene.provider.add({"farm": scene.ledger.farm_tag(), "allocation": "e-gone-a1-policy", "episode": "e-gone"})
    scene.provider.undeletable |= {sandbox_id, stray}
    scene.kill(spec)

    def counted() -> dict[str, float]:
        scene.round()
        found = series(scrape(scene.farm))
        return {kind: value(found, "farm_not_settled", kind=kind) for kind in Kind}

    assert counted() == {"episode": 0, "allocation": 1, "sandbox": 1, "provider": 0}
    scene.provider.undeletable.clear()
    scene.provider.refuse_list = OutcomeUnknown("no answer")
    scene.pass_time(60)
    assert counted()["provider"] == 1
    scene.provider.refuse_list = None
    scene.pass_time(60)
    assert counted() == dict.fromkeys(Kind, 0)


def test_a_scrape_asks_no_more_of_redis_however_many_receipts_there_are(farm: Farm) -> None:
    """A bench times it (python -m tests.bench scrape); what must not grow for that is counted here."""
    sample, written = a_receipt(a_spec(), Outcome.SOLVED, phases={Phase.POLICY: 1.0}), 0
    text = sample.model_dump_json()

    def asked(receipts: int) -> tuple[dict[str, int], int, int]:
        """With so many receipts: calls by command, those inside scripts too; keys looked up; bytes answered."""
        nonlocal written
        pipeline, new = farm.redis.pipeline(), range(written, receipts)
        for episode in (f"e-{number}" for number in new):
            pipeline.set(Keys.receipt(episode), text.replace(sample.episode_id, episode), ex=100)
            pipeline.xadd(Keys.finished(sample.run_id), {"episode": episode})
        pipeline.expire(Keys.finished(sample.run_id), 100)
        pipeline.zadd(Keys.RECEIPTS, {f"e-{number}": number for number in new})
        for name, count in {"episodes:solved": 1, **counts_of(sample)}.items():
            pipeline.hincrby(Keys.COUNTERS, name, count * len(new))
        pipeline.execute()
        written = receipts
        farm.redis.config_resetstat()
        assert read(farm).counters["episodes:solved"] == str(receipts)
        calls = {name.removeprefix("cmdstat_"): row["calls"] for name, row in farm.redis.info("commandstats").items()}
        stats = farm.redis.info("stats")
        ours = {name: count for name, count in calls.items() if name not in ("info", "ping", "config|resetstat")}
        return ours, stats["keyspace_hits"] + stats["keyspace_misses"], stats["total_net_output_bytes"]

    asked(1)  # connections are made and scripts loaded
    (few, few_keys, few_bytes), (many, many_keys, many_bytes) = asked(10), asked(2000)
    assert few["hgetall"] >= 1
    assert many == few
    assert many_keys == few_keys
    assert many_bytes - few_bytes < 500, "numbers have more digits, and that is all"


def test_a_late_settlement_is_in_the_cost_of_its_episode_and_counted_once(redis_url: str) -> None:
    with farm_of(farm_settings(redis_url)) as farm:
        row, lease = ended_unresolved(farm)
        assert value(series(scrape(farm)), "farm_episode_cost_usd_count") == 0
        for _ in range(2):
            farm.ledger.allocations.absent(row, lease.token, running_ms=60_000)
        found = series(scrape(farm))
        assert value(found, "farm_episode_cost_usd_count") == 1
        assert value(found, "farm_episode_cost_usd_sum") == value(found, "farm_cost_usd_total", role="policy") > 0


def test_the_budget_is_told_with_its_limit_once_there_is_one(redis_url: str) -> None:
    with farm_of(farm_settings(redis_url)) as farm:
        spec, _ = leased(farm)
        admit(farm, spec.episode_id)
        found = series(scrape(farm))
        assert ("farm_budget_usd", frozenset({("kind", "limit")})) not in found
        reserved = float(usd(farm.budget.read().reserved_picousd))
        assert value(found, "farm_budget_usd", kind="reserved") == reserved > 0
        assert value(found, "farm_budget_usd", kind="spent") == 0
        farm.budget.set("2.50")
        assert value(series(scrape(farm)), "farm_budget_usd", kind="limit") == 2.5


def test_without_redis_metrics_say_so_and_readiness_fails(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", appendfsync="no") as server:
        farm = open_farm(farm_settings(server.url), patient=False)
        with serving(create_app(farm), "127.0.0.1", 0) as url:
            assert httpx.get(f"{url}/readyz").status_code == 200
            server.stop()
            answer = httpx.get(f"{url}/metrics", timeout=10)
            assert (answer.status_code, series(answer.text)) == (200, {("farm_redis_up", frozenset()): 0.0})
            assert httpx.get(f"{url}/readyz", timeout=10).status_code == 503
            assert httpx.get(f"{url}/healthz").status_code == 200


def test_a_redis_that_answers_late_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Prometheus gives a scrape 10 s, Kubernetes a probe 5 s; a reading is a dozen answers."""
    with RedisProcess(tmp_path / "redis") as server, slow_port(server.port, seconds=2) as port:
        farm = open_farm(farm_settings(f"redis://127.0.0.1:{port}/0"), patient=False, answer_seconds=3)
        with serving(create_app(farm), "127.0.0.1", 0) as url:
            for _ in range(2):
                assert httpx.get(f"{url}/readyz", timeout=5).status_code in (200, 503)
                found = series(httpx.get(f"{url}/metrics", timeout=10).text)
                assert found == {("farm_redis_up", frozenset()): 0.0}
                assert httpx.get(f"{url}/healthz", timeout=5).status_code == 200
            wait_until(
                lambda: httpx.get(f"{url}/readyz", timeout=5).status_code == 200, description="a ping is one answer"
            )


def test_openmetrics_is_spoken_to_who_asks_for_it(redis_url: str) -> None:
    with farm_of(farm_settings(redis_url)) as farm:
        with serving(create_app(farm), "127.0.0.1", 0) as url:
            answer = httpx.get(f"{url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


@pytest.mark.parametrize("version", ["banana", "1.0.x", "2.0.x", "9" * 5000, "\xe9", "", "-1"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_a_format_that_nobody_can_read_is_answered_in_one_that_is_known(farm: Farm, kind: str, version: str) -> None:
    with serving(create_app(farm), "127.0.0.1", 0) as url:
        answer = httpx.get(f"{url}/metrics", headers={b"Accept": f"{kind}; version={version}".encode("latin-1")})
    assert answer.status_code == 200
    assert "farm_redis_up 1" in answer.text


def test_a_token_guards_the_metrics_and_not_the_probes(redis_url: str) -> None:
    with farm_of(farm_settings(redis_url)) as farm:
        with serving(create_app(farm, token="secret"), "127.0.0.1", 0) as url:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "secret"},
                {"Authorization": "Basic secret"},
            ):
                assert httpx.get(f"{url}/metrics", headers=headers).status_code == 401
            for bearer in ("Bearer", "bearer", "BEARER", "Bearer "):
                headers = {"Authorization": f"{bearer} secret"}
                assert httpx.get(f"{url}/metrics", headers=headers).status_code == 200
            assert httpx.get(f"{url}/healthz").status_code == 200


@pytest.mark.parametrize("host", ["farm.example", "farm.example:9400", "10.0.0.7:9400", ""])
def test_without_a_token_metrics_are_read_under_no_foreign_name_and_probes_under_any(farm: Farm, host: str) -> None:
    with serving(create_app(farm), "127.0.0.1", 0) as url:
        answer = httpx.get(f"{url}/metrics", headers={"Host": host})
        assert (answer.status_code, "FARM_METRICS_TOKEN" in answer.text) == (403, True)
        for path in ("/healthz", "/readyz"):
            assert httpx.get(f"{url}{path}", headers={"Host": host}).status_code == 200
    with serving(create_app(farm, token="secret"), "127.0.0.1", 0) as url:
        headers = {"Host": host, "Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/metrics", headers=headers).status_code == 200


def test_an_address_that_is_taken_is_a_clear_error(redis_url: str) -> None:
    with farm_of(farm_settings(redis_url)) as farm:
        with serving(create_app(farm), "127.0.0.1", 0) as url:
            port = int(url.rpartition(":")[2])
            with pytest.raises(SettingsError, match=f"127.0.0.1:{port} cannot be listened on .* choose another"):
                with serving(create_app(farm), "127.0.0.1", port):
                    pass


def test_the_orchestrator_serves_its_metrics(lasting: Field, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli", "orchestrator", "--metrics-port", "0"]
    environment = {**worker_environment(lasting.settings), "PYTHONPATH": str(ROOT)}
    running = Marked(command, environment=environment, cwd=tmp_path, output=tmp_path / "output")
    try:
        where = wait_until(
            lambda: re.search(r"http://127[\d.:]+/metrics", running.stdout), seconds=30, description="it says where"
        )
        assert where is not None
        assert httpx.get(where.group()).text == scrape(lasting.farm)
        running.process.terminate()
        assert running.wait(20) == 0
    finally:
        running.end()


def test_beyond_loopback_a_token_is_wanted(lasting: Field, tmp_path: Path) -> None:
    command = [*warm.FARM_COMMAND, "orchestrator", "--metrics-port", "0", "--metrics-host", "0.0.0.0"]
    environment = {**worker_environment(lasting.settings), "PYTHONPATH": str(ROOT)}
    output = tmp_path / "output"
    running = Marked(command, environment=environment, cwd=tmp_path, output=output, template=warm.farm())
    try:
        assert running.wait(30) == 3
        assert "FARM_METRICS_TOKEN" in running.stderr
    finally:
        running.end()
