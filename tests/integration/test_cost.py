"""Sums over receipts and running sandboxes: each sandbox once, exact, what waits for the model apart."""

from __future__ import annotations

import csv
import json
from decimal import Decimal
from typing import Any

import pytest
from prometheus_client import generate_latest
from redis import Redis
from typer.testing import CliRunner

from deploy.command_line import build
from orchestrator.cost import LIST_PRICES, By, cost_picousd, usd
from orchestrator.errors import FarmError
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.metrics import read, registry_of
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import EpisodeSpec, Operation
from orchestrator.rows import Lease
from orchestrator.spending import Bill, Spending, burn_picousd_per_hour, cost_so_far
from orchestrator.status import read_status
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import TASK, a_receipt, a_spec, admit, intended, leased, stored

HOUR_PICOUSD = 108_900_000_000
"""Of 2 vCPU and 512 MiB."""


@pytest.fixture(autouse=True)
def _surroundings(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)


def price(ms: int) -> int:
    return cost_picousd(ms, vcpus=2, memory_mb=512, rates=LIST_PRICES)


def sandbox(farm: Farm, spec: EpisodeSpec, lease: Lease, role: Role, *, ms: int | None, age_ms: int = 0) -> None:
    """A sandbox that ran `ms`, or that has run for `age_ms` and does still."""
    row = intended(farm, spec, lease, role, longest_seconds=600)
    farm.ledger.allocations.created(row, f"sbx-{role}", lease.token, creating_ms=age_ms)
    row = farm.ledger.allocations.sized(stored(farm, row.allocation_id), vcpus=2, memory_mb=512).row
    if ms is not None:
        farm.ledger.allocations.absent(row, lease.token, running_ms=ms)


def ended(
    farm: Farm, policy_ms: int, verifier_ms: int, outcome: Outcome = Outcome.SOLVED, **changes: Any
) -> EpisodeSpec:
    """An episode of two sandboxes whose window was open for a second, with commands for a quarter of it."""
    spec, lease = leased(farm, a_spec(**changes))
    sandbox(farm, spec, lease, Role.POLICY, ms=policy_ms)
    sandbox(farm, spec, lease, Role.VERIFIER, ms=verifier_ms)
    receipt = a_receipt(
        spec,
        outcome,
        group_id=spec.group_id,
        allocations=farm.ledger.allocation_ids(spec.episode_id),
        phases={"policy": 1.0, "verify": 0.5},
        operations=(
            Operation(name="reset", seconds=9.0),
            Operation(name="terminal", seconds=0.2),
            Operation(name="terminal", seconds=0.05),
        ),
        finished_at=changes.get("finished_at", 86_400.0),
    )
    farm.ledger.commit(receipt, lease.token)
    return spec


def bills(farm: Farm, by: By, **wanted: Any) -> tuple[dict[str, Bill], Bill]:
    spending = Spending(farm.ledger, Receipts(farm.redis, farm.ledger.allocations))
    return spending.bills(by, ReceiptFilter(**wanted))


def command(*words: str) -> str:
    done = CliRunner().invoke(build(), ["cost", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_roles_are_told_apart_and_waiting_is_shown_apart(farm: Farm) -> None:
    ended(farm, 4000, 2000)
    ended(farm, 3000, 1000)
    sums, total = bills(farm, By.ROLE)
    policy, verifier = price(4000) + price(3000), price(2000) + price(1000)
    waiting = price(4000) * 750 // 4000 + price(3000) * 750 // 3000
    assert sums == {
        "policy": Bill(2, 2, 0, 7000, 1500, policy, waiting),
        "verifier": Bill(2, 2, 0, 3000, 0, verifier, 0),
    }
    assert total == Bill(2, 4, 0, 10_000, 1500, policy + verifier, waiting)


def test_the_sum_equals_the_counters_and_the_budgets_books(farm: Farm, redis: Redis) -> None:
    for number in range(20):
        ended(farm, 1000 + 37 * number, 17 * number)
    _, total = bills(farm, By.EPISODE)
    counted = sum(int(redis.hget(Keys.COUNTERS, f"cost_picousd:{role}") or 0) for role in Role)
    assert total.cost_picousd == counted == farm.budget.read("run-test").spent_picousd


@pytest.mark.parametrize(
    ("by", "keys"),
    [
        (By.TASK, {"weekly-sales"}),
        (By.OUTCOME, {"solved", "wrong_answer"}),
        (By.RUN, {"run-a", "run-b"}),
        (By.GROUP, {"g-1", "-"}),
        (By.EPISODE, {"e-1", "e-2", "e-3"}),
        (By.DAY, {"1970-01-02"}),
    ],
)
def test_each_way_to_split_has_the_same_total(farm: Farm, by: By, keys: set[str]) -> None:
    ended(farm, 100, 200, episode_id="e-1", run_id="run-a", group_id="g-1")
    ended(farm, 300, 400, Outcome.WRONG_ANSWER, episode_id="e-2", run_id="run-a")
    ended(farm, 500, 600, episode_id="e-3", run_id="run-b")
    sums, total = bills(farm, by)
    assert set(sums) == keys
    assert sum(bill.cost_picousd for bill in sums.values()) == total.cost_picousd
    assert (total.episodes, total.sandboxes, total.running_ms) == (3, 6, 2100)
    _, of_a = bills(farm, by, run_id="run-a")
    assert (of_a.episodes, of_a.running_ms) == (2, 1000)


def test_an_episode_that_never_had_a_sandbox_is_an_episode(farm: Farm) -> None:
    spec, lease = leased(farm)
    farm.ledger.commit(a_receipt(spec, Outcome.CANCELLED), lease.token)
    assert bills(farm, By.OUTCOME)[0] == {"cancelled": Bill(episodes=1)}
    assert bills(farm, By.ROLE) == ({}, Bill(episodes=1))


def test_what_runs_accrues_and_what_it_had_before_counts(farm: Farm) -> None:
    spec, lease = leased(farm)
    sandbox(farm, spec, lease, Role.POLICY, ms=5000)
    sandbox(farm, spec, lease, Role.VERIFIER, ms=None, age_ms=60_000)
    sums, total = bills(farm, By.ROLE)
    assert sums["policy"] == Bill(1, 1, 0, 5000, 0, price(5000), 0)
    live = sums["verifier"]
    assert (live.sandboxes, live.open_sandboxes) == (1, 1)
    assert 60_000 <= live.running_ms < 90_000
    assert live.cost_picousd == price(live.running_ms)
    assert bills(farm, By.OUTCOME)[0]["open"].sandboxes == 2
    assert total.episodes == 1
    assert bills(farm, By.RUN, run_id="run-other") == ({}, Bill())
    farm.ledger.commit(a_receipt(spec), lease.token)


def test_an_unresolved_sandbox_accrues_after_its_receipt_once_and_no_longer_than_it_can_live(farm: Farm) -> None:
    spec, lease = leased(farm)
    sandbox(farm, spec, lease, Role.POLICY, ms=None, age_ms=60_000)
    name = farm.ledger.allocation_ids(spec.episode_id)[0]
    farm.ledger.allocations.unresolved(stored(farm, name), lease.token, "500")
    farm.ledger.commit(a_receipt(spec, Outcome.CLEANUP_UNRESOLVED, allocations=(name,)), lease.token)
    _, total = bills(farm, By.ROLE)
    assert (total.episodes, total.open_sandboxes) == (1, 1)
    assert 60_000 <= total.running_ms < 90_000
    farm.redis.hincrby(Keys.allocation(name), "created_at", -3_600_000)
    assert bills(farm, By.ROLE)[1].running_ms == 600_000


def test_the_burn_rate_is_that_of_sandboxes_that_may_run(farm: Farm) -> None:
    def burn() -> int:
        return burn_picousd_per_hour(farm.ledger.allocations.running())

    assert burn() == 0
    first, second = leased(farm), leased(farm)
    sandbox(farm, *first, Role.POLICY, ms=None)
    sandbox(farm, *second, Role.POLICY, ms=None)
    assert burn() == 2 * HOUR_PICOUSD
    intended(farm, *leased(farm))
    assert burn() == 2 * HOUR_PICOUSD, "nothing was sent for the third"
    for spec, _ in (first, second):
        farm.redis.hincrby(Keys.allocation(farm.ledger.allocation_ids(spec.episode_id)[0]), "created_at", -601_000)
    assert burn() == 0, "the provider has ended them"


def test_a_sandbox_whose_size_is_not_known_yet_burns_as_one_of_the_assumed_size(farm: Farm) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease, Role.POLICY)
    farm.ledger.allocations.created(row, "sandbox-1", lease.token, creating_ms=10)
    rates = farm.settings.rates()
    assumed = cost_picousd(3_600_000, vcpus=rates.assumed.vcpus, memory_mb=rates.assumed.memory_mb, rates=rates)
    assert burn_picousd_per_hour(farm.ledger.allocations.running()) == assumed > 0
    assert read_status(farm).burn_picousd_per_hour == assumed
    assert f"farm_burn_usd_per_hour {float(usd(assumed))}" in generate_latest(registry_of(read(farm))).decode()


def test_burn_accrual_and_price_agree_on_a_sandbox_whose_size_nobody_read(farm: Farm) -> None:
    """Its template is known to be larger than what this reader would assume."""
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.created(row, "sandbox-1", lease.token, creating_ms=10)
    farm.ledger.allocations.sized(row, vcpus=8, memory_mb=8192)
    farm.ledger.allocations.absent(row, lease.token, running_ms=1000)
    farm.ledger.commit(a_receipt(spec, allocations=(row.allocation_id,)), lease.token)

    spec, lease = leased(farm)
    admit(farm, spec.episode_id)
    row = intended(farm, spec, lease, longest_seconds=7200)
    farm.ledger.allocations.created(row, "sandbox-2", lease.token, creating_ms=10)
    row = stored(farm, row.allocation_id)
    assert row.created_at is not None
    hourly = cost_picousd(3_600_000, vcpus=8, memory_mb=8192, rates=LIST_PRICES)
    assert burn_picousd_per_hour(farm.ledger.allocations.running()) == hourly
    assert cost_so_far(farm.ledger.allocations, row, row.created_at + 3600) == hourly
    farm.ledger.allocations.absent(row, lease.token, running_ms=3_600_000)
    assert stored(farm, row.allocation_id).cost_picousd == hourly
    farm.ledger.commit(a_receipt(spec, allocations=(row.allocation_id,)), lease.token)


def test_many_receipts_are_read_a_page_at_a_time(farm: Farm) -> None:
    for _ in range(450):
        spec, lease = leased(farm)
        farm.ledger.commit(a_receipt(spec), lease.token)
    assert bills(farm, By.DAY)[1] == Bill(episodes=450)


def test_the_command_writes_a_table_json_and_csv(farm: Farm) -> None:
    ended(farm, 4000, 2000, run_id="run-a")
    ended(farm, 40, 20, run_id="run-b")
    lines = command("--by", "run").splitlines()
    assert [line.split()[0] for line in lines] == ["run", "run-a", "run-b", "total"]
    read = json.loads(command("--by", "run", "--json"))
    assert [row["run"] for row in read["rows"]] == ["run-a", "run-b"]
    total = price(4000) + price(2000) + price(40) + price(20)
    assert Decimal(read["total"]["cost_usd"]) == Decimal(total) / 10**12
    assert read["total"]["waiting_seconds"] == 0.75 + 0.04
    assert read["burn_usd_per_hour"] == "0"
    rows = list(csv.DictReader(command("--by", "run", "--format", "csv").splitlines()))
    assert sum(Decimal(row["cost_usd"]) for row in rows) == Decimal(total) / 10**12
    assert json.loads(command("--run", "run-b", "--format", "json"))["total"]["sandboxes"] == 2
    assert json.loads(command("--since", "1h", "--json"))["total"]["episodes"] == 2
    assert json.loads(command("--until", "1h", "--json"))["total"]["episodes"] == 0


def test_without_a_group_the_csv_has_an_empty_cell_and_the_table_a_dash(farm: Farm) -> None:
    ended(farm, 4000, 2000, group_id="g-1")
    ended(farm, 40, 20)
    rows = list(csv.DictReader(command("--by", "group", "--format", "csv").splitlines()))
    assert [row["group"] for row in rows] == ["g-1", ""]
    assert [line.split()[0] for line in command("--by", "group").splitlines()] == ["group", "g-1", "-", "total"]


def test_the_table_says_what_runs_now(farm: Farm) -> None:
    spec, lease = leased(farm)
    sandbox(farm, spec, lease, Role.POLICY, ms=None)
    assert "costs 0.1089 USD an hour" in command()
    farm.ledger.commit(a_receipt(spec), lease.token)


def test_an_unknown_run_is_an_error_that_says_what_to_do() -> None:
    done = CliRunner().invoke(build(), ["cost", "--run", "run-none"])
    assert isinstance(done.exception, FarmError)
    assert "rollout-farm receipts" in str(done.exception)


def test_the_task_of_an_open_episode_is_filtered_too(farm: Farm) -> None:
    spec, lease = leased(farm)
    sandbox(farm, spec, lease, Role.POLICY, ms=None)
    assert bills(farm, By.TASK, task_id=TASK.id)[1].sandboxes == 1
    assert bills(farm, By.TASK, task_id="another") == ({}, Bill())
    farm.ledger.commit(a_receipt(spec), lease.token)


def test_a_row_that_cannot_be_read_hides_no_other(farm: Farm, redis: Redis) -> None:
    readable, lease = leased(farm)
    sandbox(farm, readable, lease, Role.POLICY, ms=1000)
    broken, lease = leased(farm)
    sandbox(farm, broken, lease, Role.POLICY, ms=2000)
    redis.hset(Keys.episode(broken.episode_id), "spec", '{"schema_version": 99}')
    sums, total = Spending(farm.ledger, Receipts(redis, farm.ledger.allocations)).bills(By.TASK, ReceiptFilter())
    assert {task: bill.cost_picousd for task, bill in sums.items()} == {TASK.id: price(1000), "unknown": price(2000)}
    assert total.cost_picousd == price(3000)
