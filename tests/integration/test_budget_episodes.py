"""Budgets over real episodes in real sandboxes: what is reserved, what it costs, and what is too dear."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import pytest

from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.provider import SandboxRow
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field
from tests.support.ground import KEY
from tests.support.policies import candidate, repaired, script, weekly_sales
from workers.sandboxes.provider import E2BProvider

pytest_plugins = ["tests.support.farm"]

RUN = "run-test"
LONGEST_SECONDS = 611 + 120


class LargeProvider(E2BProvider):
    """A provider whose sandboxes turn out to be larger than any that was reserved for."""

    def describe(self, sandbox_id: str) -> SandboxRow | None:
        """The row, with another size."""
        seen = super().describe(sandbox_id)
        return None if seen is None else SandboxRow(sandbox_id, seen.metadata, seen.started_at, 64, 64 * 1024)


def spent(field: Field) -> int:
    balance = field.farm.budget.read(RUN)
    assert balance.reserved_picousd == 0
    return balance.spent_picousd


def large(field: Field) -> Any:
    return LargeProvider(KEY, api_url=field.ground.sandboxes.url)


def test_episodes_run_until_the_budget_cannot_pay_for_another(field: Field) -> None:
    assert field.run(field.spec(script(candidate(repaired())), run_id=RUN)) == "solved"
    cost = spent(field)
    assert cost > 0
    size = str(field.farm.redis.hget(Keys.SIZES, "base"))
    vcpus, memory_mb = map(int, size.split(":"))
    worst = LONGEST_SECONDS * (vcpus * 14_000_000 + memory_mb * 4_500_000 // 1024)
    field.farm.budget.set(Decimal(cost + worst) / 10**12, run_id=RUN)
    second = field.spec(script(candidate(repaired())), run_id=RUN)
    assert field.run(second) == "solved", "what it can cost fits to the last pico-dollar"
    third = field.spec(script(), run_id=RUN)
    assert field.run(third) == "budget_exhausted"
    field.check_ended(third.episode_id, Outcome.BUDGET_EXHAUSTED, roles=())
    assert spent(field) == cost + field.receipt(second.episode_id).cost_picousd <= cost + worst


@pytest.mark.parametrize("budget", [None, "0.5"])
def test_a_sandbox_that_turns_out_too_large_for_the_budget_is_deleted_at_once(field: Field, budget: str | None) -> None:
    field.farm.budget.set(budget, run_id=RUN)
    spec = field.spec(script(candidate(repaired())), run_id=RUN)
    outcome = field.run(spec, provider=large(field))
    if budget is None:
        assert outcome == "solved"
        return
    settled = field.check_ended(spec.episode_id, Outcome.BUDGET_EXHAUSTED, roles=("policy",))
    assert settled.receipt.detail is not None
    assert "64 vCPU and 65536 MiB" in settled.receipt.detail
    assert spent(field) == settled.cost_picousd < 10**12
    assert field.run(field.spec(script(), run_id=RUN), provider=large(field)) == "budget_exhausted", (
        "its size is known now"
    )


def test_a_remote_episode_that_cannot_be_paid_for_tells_its_trainer(field: Field) -> None:
    field.farm.budget.set(0)
    running = field.remote(field.spec())
    assert running.episode.wait(20).outcome is Outcome.BUDGET_EXHAUSTED
    running.end()


def test_workers_run_one_episode_after_another_where_only_one_can_be_paid_for(field: Field) -> None:
    """The second slot's episode goes back to the queue while the first one's reservation stands, and comes again."""
    first = field.spec(script(candidate(repaired())), run_id=RUN)
    assert field.run(first) == "solved", "its template's size is known from here on"
    balance = field.farm.budget.read(RUN)
    vcpus, memory_mb = map(int, str(field.farm.redis.hget(Keys.SIZES, "base")).split(":"))
    one = LONGEST_SECONDS * (vcpus * 14_000_000 + memory_mb * 4_500_000 // 1024)
    field.farm.budget.set(Decimal(balance.spent_picousd + one * 11 // 10) / 10**12, run_id=RUN)
    field.worker()
    with Pool(field.settings, run_id=RUN) as pool:
        episodes = [pool.submit(weekly_sales(), policy=script("sleep 1", candidate(repaired()))) for _ in range(3)]
        receipts = pool.receipts(episodes)
        assert [settled.receipt.outcome for settled in receipts] == [Outcome.SOLVED] * 3
        lives = sorted((row.allocations[0].created_at or 0.0, row.allocations[-1].absent_at or 0.0) for row in receipts)
        for (_, ended), (began, _) in itertools.pairwise(lives):
            assert ended < began, "two were paid for at once"
        pool.redis.close()
    assert spent(field) == balance.spent_picousd + sum(settled.cost_picousd for settled in receipts)
