"""A real Prometheus scrapes a real orchestrator: every rule, panel and scaling query returns what the farm did.

One farm for the module: real episodes in real sandboxes, and through the real ledger, limiter and reconciler whatever a
dashboard can show.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from deploy.embedded import EmbeddedRedis
from orchestrator.cost import usd
from orchestrator.errors import ConcurrencyLimited, RateLimited
from orchestrator.farm import Farm, open_farm
from orchestrator.presence import WorkerRow
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.vocabulary import SLOTS_PER_WORKER, Outcome, Role
from tests.support import dashboards
from tests.support.bare_farm import a_receipt, a_request, a_spec, admit, intended, leased
from tests.support.farm import Field
from tests.support.ground import KEY, Ground, open_settings
from tests.support.policies import candidate, repaired, script
from tests.support.processes import Marked, worker_environment
from tests.support.prometheus import DEPLOY, Prometheus, aggregations, rules, running_prometheus, told
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider

pytest_plugins = ["tests.support.farm"]

TOKEN = "metrics-test-token"
VARIABLES = {"job": "rollout-farm", "__rate_interval": "5m", "__range": "1h", "__interval": "15s"}
WAITING, RUNNING, WORKERS, LOST = 3, 2, 4, 12


@dataclass
class Watched:
    """A farm, its orchestrator and the Prometheus that looks at it."""

    field: Field
    redis: EmbeddedRedis
    orchestrator: Marked
    prometheus: Prometheus

    @property
    def farm(self) -> Farm:
        return self.field.farm


@contextmanager
def watching(ground: Ground, directory: Path) -> Iterator[Watched]:
    """A farm without a past, looked at once: Prometheus counts what is added between two looks."""
    with ExitStack() as exits:
        redis = exits.enter_context(EmbeddedRedis(directory / "redis", appendfsync="no"))
        settings = open_settings(ground).model_copy(update={"redis_url": redis.url})
        provider = E2BProvider(KEY, api_url=ground.sandboxes.url)
        field = Field(settings, open_farm(settings), provider, ground, exits, [])
        # as compose and Kubernetes start it, but on loopback
        variables = {"FARM_METRICS_PORT": "0", "FARM_METRICS_TOKEN": TOKEN}
        orchestrator = Marked(
            [sys.executable, "-m", "deploy.cli", "orchestrator"],
            environment={**worker_environment(settings), **variables},
            cwd=directory,
            output=directory / "orchestrator.out",
        )
        exits.callback(orchestrator.end)
        where = wait_until(
            lambda: re.search(r"http://(127[\d.:]+)/metrics", orchestrator.stdout), seconds=40, description="it serves"
        )
        assert where is not None
        prometheus = exits.enter_context(running_prometheus(directory, where.group(1), TOKEN))
        wait_until(lambda: prometheus.values("farm_orphans_total"), seconds=20, description="a first look")
        yield Watched(field, redis, orchestrator, prometheus)


@pytest.fixture(scope="module")
def watched(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A farm that did everything that can be shown; tests only look."""
    with watching(ground, tmp_path_factory.mktemp("watched")) as made, workers_alive(made.farm):
        cause_traffic(made)
        yield made


@contextmanager
def workers_alive(farm: Farm) -> Iterator[None]:
    """Workers that say that they are alive, and take nothing."""
    over = threading.Event()

    def beat() -> None:
        while True:
            for number in range(WORKERS):
                row = WorkerRow(f"worker-{number}", "here", 1, "running", SLOTS_PER_WORKER, "http://127.0.0.1:1")
                farm.presence.beat_worker(row, [f"worker-{number}-{slot}" for slot in range(SLOTS_PER_WORKER)])
            if over.wait(1.0):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join(10)


def check_data(prometheus: Prometheus, expressions: Mapping[str, str]) -> None:
    """Wait until every expression has given a number; `expressions` by the name to complain with."""
    missing = dict(expressions)

    def look() -> bool:
        for name in [name for name, expression in missing.items() if prometheus.values(expression)]:
            del missing[name]
        return not missing

    try:
        wait_until(look, seconds=60, description="everything has data")
    except AssertionError:
        raise AssertionError("without data:\n" + "\n".join(missing)) from None


def cause_traffic(watched: Watched) -> None:
    field, farm = watched.field, watched.farm
    stray = a_request(a_spec("e-stray"), farm_tag=farm.ledger.farm_tag())
    field.provider.create(stray)  # the orchestrator finds it: an orphan
    field.run(field.spec(script(candidate(repaired()), "cat nothing", "echo seen")))
    field.run(field.spec(script("rm report.py")))
    field.run(field.spec(script(), template="no-such-template"))
    for _ in range(LOST):
        end(farm, Outcome.WORKER_LOST)
    end(farm, Outcome.BUDGET_EXHAUSTED)
    give_up(farm)
    keep_running(farm)
    for _ in range(WAITING):
        waiting = a_spec()
        farm.ledger.open(waiting)
        farm.queue.enqueue(waiting)
    for number in range(20):
        farm.limiter.creation(f"e-{number}", Role.POLICY).refused(RateLimited("too fast", retry_after_seconds=60))
    farm.limiter.creation("e-refused", Role.POLICY).refused(ConcurrencyLimited("too many"))
    farm.budget.set(Decimal(usd(farm.budget.read().spent_picousd)) * Decimal("1.1"))


def end(farm: Farm, outcome: Outcome) -> None:
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec, outcome), lease.token)


def give_up(farm: Farm) -> None:
    """A sandbox whose end was never confirmed."""
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.unknown(row, lease.token, "its answer was lost")
    farm.ledger.allocations.expired(row, lease.token, "its longest life is over")
    farm.ledger.commit(a_receipt(spec, Outcome.CLEANUP_UNRESOLVED, allocations=(row.allocation_id,)), lease.token)


def keep_running(farm: Farm) -> None:
    """Two episodes that run: one in its sandbox, one with a sandbox that could not be deleted."""
    for stuck in (False, True):
        spec, lease = leased(farm, lease_seconds=600)
        admit(farm, spec.episode_id)
        row = intended(farm, spec, lease, Role.VERIFIER if stuck else Role.POLICY)
        farm.ledger.allocations.created(row, f"sandbox-{stuck}", lease.token, creating_ms=10)
        row = farm.ledger.allocations.sized(row, vcpus=2, memory_mb=512).row
        if stuck:
            farm.ledger.allocations.unresolved(row, lease.token, "the deletion was not answered")


def test_the_target_is_up_and_says_what_the_receipts_say(watched: Watched) -> None:
    prometheus = watched.prometheus
    assert prometheus.value('up{job="rollout-farm"}') == 1
    assert prometheus.label_values("job", "farm_redis_up") == ["rollout-farm"]
    receipts = list(Receipts(watched.farm.redis, watched.farm.ledger.allocations).select(ReceiptFilter()))
    lost = [settled for settled in receipts if settled.receipt.outcome is Outcome.WORKER_LOST]
    assert len(lost) == LOST

    def counted() -> dict[str, float]:
        rows = prometheus.query("farm_episodes_total > 0")
        return {row["metric"]["outcome"]: float(row["value"][1]) for row in rows}

    wanted = dict.fromkeys({str(settled.receipt.outcome) for settled in receipts}, 0.0)
    for settled in receipts:
        wanted[settled.receipt.outcome] += 1
    wait_until(lambda: counted() == wanted, seconds=20, description=f"Prometheus has {wanted}")


def test_every_query_of_every_panel_returns_data(watched: Watched) -> None:
    asked = {str(query): dashboards.filled(query.expression, VARIABLES) for query in dashboards.queries()}
    assert len(asked) > 40
    check_data(watched.prometheus, asked)


def test_every_label_that_is_grouped_by_or_shown_is_there(watched: Watched) -> None:
    """To Prometheus a label that nothing has is empty and no error: a chart would show one line without a name."""
    wanted: dict[str, tuple[str, ...]] = {}
    for query in dashboards.queries():
        expression = dashboards.filled(query.expression, VARIABLES)
        wanted |= dict(aggregations(expression))
        if query.legend_labels:
            wanted[expression] = query.legend_labels
    for rule in rules():
        wanted |= dict(aggregations(rule["expr"]))
    assert len(wanted) > 40
    check_data(watched.prometheus, {expression: expression for expression in wanted})
    for expression, labels in wanted.items():
        for row in watched.prometheus.query(expression):
            missing = [label for label in labels if not row["metric"].get(label)]
            assert not missing, f"{missing} of {expression}: {row['metric']}"


def test_every_rule_returns_data_and_the_alerts_of_this_traffic_are_raised(watched: Watched) -> None:
    prometheus = watched.prometheus
    asked = {rule["expr"]: told(rule["expr"]) if "alert" in rule else rule["expr"] for rule in rules()}
    asked |= {rule["record"]: rule["record"] for rule in rules() if "record" in rule}
    check_data(prometheus, asked)
    assert prometheus.unhealthy_rules() == []
    expected = {
        "FarmCleanupUnresolved",
        "FarmCleanupNeverConfirmed",
        "FarmOrphans",
        "FarmRateLimitStorm",
        "FarmInfrastructureAborts",
        "FarmBudgetAt80Percent",
        "FarmBudgetExhausted",
    }
    wait_until(lambda: expected <= prometheus.alerts(), seconds=60, description=f"alerts {expected}")
    assert prometheus.alerts() == expected


def test_the_autoscaler_asks_for_the_episodes_that_wait_and_run(watched: Watched) -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "autoscaling.yaml").read_text())
    (trigger,) = next(d for d in documents if d["kind"] == "ScaledObject")["spec"]["triggers"]
    wait_until(
        lambda: watched.prometheus.values(trigger["metadata"]["query"]) == [WAITING + RUNNING],
        seconds=20,
        description="what waits and what runs",
    )


def test_when_redis_and_then_the_orchestrator_are_away_prometheus_says_so_and_keeps_no_ghosts(
    ground: Ground, tmp_path: Path
) -> None:
    with watching(ground, tmp_path) as watched:
        check_outage(watched)


def check_outage(watched: Watched) -> None:
    prometheus = watched.prometheus
    watched.redis.stop()
    wait_until(lambda: prometheus.value("farm_redis_up") == 0, seconds=20, description="Redis is seen to be away")
    wait_until(lambda: "FarmRedisAway" in prometheus.alerts(), seconds=20, description="its alert")
    assert prometheus.value('up{job="rollout-farm"}') == 1
    assert prometheus.query("farm_episodes_total") == prometheus.query("farm_workers") == []
    watched.orchestrator.end()
    wait_until(lambda: prometheus.value('up{job="rollout-farm"}') == 0, seconds=20, description="it is down")
    wait_until(lambda: "FarmTargetDown" in prometheus.alerts(), seconds=20, description="its alert")
