"""The hard cap on a real Redis: reserved with the permit, replaced by the real cost, never exceeded."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, cast

import pytest
from redis import Redis

from orchestrator.allocations import RECONCILER_TOKEN
from orchestrator.cost import By, cost_picousd, parse_usd
from orchestrator.errors import EpisodeAborted, SettingsError
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import Admission, PermitAnswer
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import EpisodeSpec
from orchestrator.rows import Lease
from orchestrator.settings import Budgets, Settings
from orchestrator.spending import Spending, burn_picousd_per_hour
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import a_receipt, a_spec, admit, farm_settings, intended, leased, opened_farm, stored
from tests.support.clocked import Clocked
from tests.support.reconcilers import LEASE_SECONDS
from tests.support.scene import LaterLedger, Scene

pytest_plugins = ["tests.support.scene"]

RUN = "run-test"
PRICE = 30_250_000
"""Pico-dollars a second of 2 vCPU and 512 MiB at list prices."""

WORST = (611 + 120) * PRICE
"""A policy sandbox of 600 s, two request times and a second of rounding, and a verifier of 120 s."""


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=10)


def ask(farm: Farm, spec: EpisodeSpec, reservation: str | None = None) -> PermitAnswer:
    return farm.limiter.ask(spec.episode_id, reservation_id=reservation)


def running(farm: Farm, spec: EpisodeSpec | None = None) -> tuple[EpisodeSpec, Lease]:
    spec, lease = leased(farm, spec)
    assert ask(farm, spec) is PermitAnswer.GRANTED
    return spec, lease


def limit(farm: Farm, picousd: int, run_id: str | None = RUN) -> None:
    farm.budget.set(Decimal(picousd) / 10**12, run_id=run_id)


def books(farm: Farm, run_id: str | None = RUN) -> tuple[int, int]:
    """Spent and reserved."""
    balance = farm.budget.read(run_id)
    return balance.spent_picousd, balance.reserved_picousd


def settle(
    farm: Farm, spec: EpisodeSpec, lease: Lease, role: Role, ms: int, *, vcpus: int = 2, memory_mb: int = 512
) -> int:
    """A sandbox's whole life; its cost."""
    row = intended(farm, spec, lease, role)
    farm.ledger.allocations.created(row, f"sbx-{role}", lease.token, creating_ms=0)
    row = farm.ledger.allocations.sized(row, vcpus=vcpus, memory_mb=memory_mb).row
    farm.ledger.allocations.absent(row, lease.token, running_ms=ms)
    return cost_picousd(ms, vcpus=vcpus, memory_mb=memory_mb, rates=farm.settings.rates())


def end(farm: Farm, *episodes: tuple[EpisodeSpec, Lease]) -> None:
    for spec, lease in episodes:
        farm.ledger.commit(a_receipt(spec), lease.token)


@pytest.mark.parametrize("whose", [RUN, None], ids=["run", "farm"])
def test_a_permit_reserves_the_longest_lives_of_both_sandboxes_and_the_receipt_gives_back_the_rest(
    farm: Farm, whose: str | None
) -> None:
    spec, lease = running(farm)
    assert books(farm, whose) == (0, WORST)
    assert ask(farm, spec) is PermitAnswer.GRANTED
    assert books(farm, whose) == (0, WORST), "asked again after a lost answer"
    cost = settle(farm, spec, lease, Role.POLICY, 12_345)
    assert books(farm, whose) == (cost, 120 * PRICE), "the verifier's share stays"
    cost += settle(farm, spec, lease, Role.VERIFIER, 777)
    assert books(farm, whose) == (cost, 0)
    end(farm, (spec, lease))
    assert books(farm, whose) == (cost, 0)


@pytest.mark.parametrize(
    ("whose", "answer", "command"),
    [
        (RUN, PermitAnswer.RUN_BUDGET, f"rollout-farm budget --run {RUN}"),
        (None, PermitAnswer.FARM_BUDGET, "rollout-farm budget"),
    ],
)
def test_what_cannot_be_paid_for_ends_as_budget_exhausted_and_running_episodes_finish(
    farm: Farm, redis: Redis, whose: str | None, answer: PermitAnswer, command: str
) -> None:
    first = running(farm)
    cost = settle(farm, *first, Role.POLICY, 1)
    limit(farm, cost + WORST - 1, whose)
    late = leased(farm)
    assert ask(farm, late[0]) is answer
    with pytest.raises(EpisodeAborted) as refused:
        admit(farm, late[0].episode_id)
    assert refused.value.outcome is Outcome.BUDGET_EXHAUSTED
    assert refused.value.detail.endswith(f"see it: {command}"), "to be copied as it is"
    assert redis.zcard(Keys.PERMITS) == 1
    assert redis.zcard(Keys.WAITERS) == 0
    settle(farm, *first, Role.VERIFIER, 1)
    end(farm, first, late)


def test_the_last_pico_dollar_can_be_reserved(farm: Farm) -> None:
    limit(farm, 2 * WORST)
    first, second = running(farm), running(farm)
    balance = farm.budget.read(RUN)
    assert (balance.left_picousd, balance.reserved_picousd) == (0, 2 * WORST)
    end(farm, first, second)


def test_a_large_budget_is_compared_to_the_last_pico_dollar(farm: Farm, redis: Redis) -> None:
    """Beyond 9,007 dollars pico-dollars are more than a double's 53 bits."""
    spent = 500_000 * 10**12 + 1
    redis.hset(Keys.budget(RUN), "spent", spent)
    spec, lease = leased(farm)
    redis.hset(Keys.budget(RUN), "limit", spent + WORST - 1)
    assert ask(farm, spec) is PermitAnswer.RUN_BUDGET
    redis.hset(Keys.budget(RUN), "limit", spent + WORST)
    assert ask(farm, spec) is PermitAnswer.GRANTED
    assert farm.budget.read(RUN).left_picousd == 0
    end(farm, (spec, lease))


def test_a_price_beyond_what_a_double_holds_comes_back_whole(redis_url: str) -> None:
    """A day of the largest sandbox at the highest price is more than 2**53 pico-dollars."""
    prices: dict[str, Any] = {"vcpu_usd_per_second": 0.001, "gib_usd_per_second": 0.000999999999999}
    day = Budgets(policy_lifetime_seconds=86_399, verifier_lifetime_seconds=3_599)
    with opened_farm(redis_url, **prices, default_vcpus=128, default_memory_mb=131_071) as farm:
        spec, lease = leased(farm, a_spec(budgets=day))
        assert ask(farm, spec) is PermitAnswer.GRANTED
        assert books(farm, None)[1] > 2**53
        never_made = intended(farm, spec, lease)
        farm.ledger.allocations.refused(never_made, lease.token, "refused")
        farm.ledger.commit(a_receipt(spec), lease.token)
        assert books(farm, None)[1] == 0


def test_money_that_is_only_reserved_is_waited_for(farm: Farm, redis: Redis) -> None:
    limit(farm, WORST + 100 * PRICE)
    first = running(farm)
    late, lease = leased(farm)
    assert ask(farm, late) is PermitAnswer.STEP_BACK
    assert redis.zcard(Keys.WAITERS) == 0, "it keeps nobody of another run waiting"
    other = running(farm, a_spec(run_id="run-other"))
    settle(farm, *first, Role.POLICY, 100)
    settle(farm, *first, Role.VERIFIER, 100)
    end(farm, first)
    assert ask(farm, late) is PermitAnswer.GRANTED
    end(farm, (late, lease), other)


def test_money_that_never_comes_back_is_waited_for_only_so_long(farm: Farm, redis: Redis) -> None:
    limit(farm, WORST)
    first, late = running(farm), leased(farm)
    name = late[0].episode_id
    assert ask(farm, late[0]) is PermitAnswer.STEP_BACK
    answer = farm.limiter.ask(name, reservation_id=None, patience_seconds=0)
    assert answer in (PermitAnswer.STEP_BACK, PermitAnswer.RUN_BUDGET)
    redis.hincrby(Keys.episode(name), "unfunded_at", -901_000)
    assert ask(farm, late[0]) is PermitAnswer.RUN_BUDGET
    end(farm, first, late)


def test_the_time_back_in_the_queue_is_no_time_without_money(farm: Farm, redis: Redis) -> None:
    limit(farm, WORST)
    first, (late, lease) = running(farm), leased(farm)
    row = Keys.episode(late.episode_id)
    for attempt in (2, 3):
        assert ask(farm, late) is PermitAnswer.STEP_BACK
        assert farm.ledger.defer(lease)
        for name in ("unfunded_at", "left_at"):  # a queue of more than half the patience, twice
            redis.hincrby(row, name, -500_000)
        again = farm.ledger.take(late.episode_id, attempt, f"slot-{attempt}", lease_seconds=60)
        assert again is not None
        lease = again
    assert ask(farm, late) is PermitAnswer.STEP_BACK
    redis.hincrby(row, "unfunded_at", -901_000)
    assert ask(farm, late) is PermitAnswer.RUN_BUDGET, "in slots it waits for so long and no longer"
    end(farm, first, (late, lease))


def test_the_time_in_line_for_a_permit_is_no_time_without_money(farm: Farm) -> None:
    clock = Clocked(farm.redis, concurrency_limit=1)
    limit(farm, WORST)
    first, late = leased(farm), leased(farm)
    assert clock.limiter.ask(first[0].episode_id, reservation_id=None) is PermitAnswer.GRANTED
    name = late[0].episode_id
    assert clock.limiter.ask(name, reservation_id=None) is PermitAnswer.STEP_BACK
    limit(farm, 2 * WORST)
    clock.pass_seconds(1)
    assert clock.limiter.ask(name, reservation_id=None) is PermitAnswer.WAIT
    clock.pass_seconds(901)
    limit(farm, WORST)
    assert clock.limiter.ask(name, reservation_id=None) is PermitAnswer.STEP_BACK, "short of money since now"
    clock.pass_seconds(901)
    assert clock.limiter.ask(name, reservation_id=None) is PermitAnswer.RUN_BUDGET
    end(farm, first, late)


def test_a_reserved_batch_does_not_wait_for_money(farm: Farm) -> None:
    """All of it has to be live at once: waiting for its own money it would only wait for its windows to end."""
    limit(farm, WORST)
    first, late = running(farm), leased(farm)
    assert ask(farm, late[0], "reservation-1") is PermitAnswer.RUN_BUDGET
    end(farm, first, late)


def test_an_admission_that_waits_for_money_goes_on_when_the_limit_is_raised(farm: Farm) -> None:
    limit(farm, WORST)
    first, late = running(farm), leased(farm)
    assert admit(farm, late[0].episode_id) is Admission.STEP_BACK, "to the queue's end: the slot is for others"
    limit(farm, 2 * WORST)
    assert admit(farm, late[0].episode_id) is Admission.GRANTED
    farm.budget.set(None, run_id=RUN)
    third = running(farm)
    end(farm, first, late, third)


def test_a_limit_counts_what_was_spent_and_reserved_before_it_was_set(farm: Farm) -> None:
    first = running(farm)
    cost = settle(farm, *first, Role.POLICY, 5000)
    limit(farm, cost + 120 * PRICE + WORST - 1)
    late = leased(farm)
    assert ask(farm, late[0]) is PermitAnswer.STEP_BACK
    end(farm, first)
    assert ask(farm, late[0]) is PermitAnswer.GRANTED
    end(farm, late)


def test_a_template_is_reserved_for_at_the_size_that_was_seen(farm: Farm) -> None:
    first = running(farm, a_spec(template="small"))
    settle(farm, *first, Role.POLICY, 1, vcpus=1, memory_mb=1024)
    small = (611 + 120) * (14_000_000 + 4_500_000)
    assert books(farm)[1] == 120 * 18_500_000, "the verifier is of the same template"
    end(farm, first)
    second = running(farm, a_spec(template="small"))
    assert books(farm)[1] == small
    third = running(farm, a_spec(template="another"))
    assert books(farm)[1] == small + WORST
    end(farm, second, third)


@pytest.mark.parametrize("room", [0, 10**12])
def test_a_sandbox_larger_than_reserved_for_is_affordable_only_while_the_limit_bears_it(farm: Farm, room: int) -> None:
    limit(farm, WORST + room)
    spec, lease = running(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.created(row, "sbx-1", lease.token, creating_ms=0)
    large, affordable = farm.ledger.allocations.sized(row, vcpus=8, memory_mb=8192)
    assert affordable is (room > 0)
    reserved = (611 + 120) * (8 * 14_000_000 + 8 * 4_500_000)
    assert books(farm) == (0, reserved)
    again = farm.ledger.allocations.sized(row, vcpus=8, memory_mb=8192)
    assert books(farm) == (0, reserved), "said again"
    assert again == (large, room > 0)
    farm.ledger.allocations.absent(large, lease.token, running_ms=100)
    end(farm, (spec, lease))
    assert books(farm)[1] == 0


def test_a_sandbox_is_paid_for_no_longer_than_it_could_live(farm: Farm) -> None:
    """Every host was dead for a day; the provider ended the sandbox after its lifetime."""
    spec, lease = running(farm)
    row = intended(farm, spec, lease, longest_seconds=611)
    farm.ledger.allocations.created(row, "sbx-1", lease.token, creating_ms=0)
    farm.ledger.allocations.absent(row, lease.token, running_ms=86_400_000)
    assert stored(farm, row.allocation_id).running_seconds == 611
    assert books(farm) == (611 * PRICE, 120 * PRICE), "without a size it is paid for as it was reserved"
    end(farm, (spec, lease))


def test_what_may_have_run_unseen_counts_as_its_longest_life(farm: Farm) -> None:
    spec, lease = running(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.unknown(row, lease.token, "its answer was lost")
    end(farm, (spec, lease))
    assert books(farm) == (0, WORST), "kept until it is settled"
    farm.ledger.allocations.expired(row, RECONCILER_TOKEN, "over")
    assert books(farm) == (611 * PRICE, 0)


def test_a_refused_creation_costs_nothing(farm: Farm) -> None:
    spec, lease = running(farm)
    farm.ledger.allocations.refused(intended(farm, spec, lease), lease.token, "429")
    end(farm, (spec, lease))
    assert books(farm) == (0, 0)


def test_a_dead_hosts_reservation_stays_until_the_reconciler_has_settled_it(scene: Scene) -> None:
    spec, _, sandbox_id = scene.started()
    scene.provider.undeletable.add(sandbox_id)
    scene.kill(spec)
    scene.round()
    assert scene.receipt(spec).outcome is Outcome.WORKER_LOST
    assert books(scene.farm) == (0, WORST)
    scene.provider.undeletable.clear()
    scene.round()
    spent, reserved = books(scene.farm)
    assert reserved == 0
    assert spent == scene.farm.ledger.receipt(spec.episode_id).cost_picousd > 0  # type: ignore[union-attr]


def test_an_episode_given_back_to_the_queue_has_nothing_reserved(farm: Farm) -> None:
    limit(farm, WORST)
    first, late = running(farm), leased(farm)
    assert ask(farm, late[0]) is PermitAnswer.STEP_BACK
    assert farm.ledger.defer(late[1])
    assert books(farm) == (0, WORST)
    end(farm, first)
    again = farm.ledger.take(late[0].episode_id, 2, "owner-2", lease_seconds=30)
    assert again is not None
    assert ask(farm, late[0]) is PermitAnswer.GRANTED
    end(farm, (late[0], again))


def test_a_cap_holds_where_another_process_settles_at_other_prices(scene: Scene) -> None:
    """Money is reserved at the rates of the worker; a reconciler of ten times the price finishes what it left."""
    limit(scene.farm, WORST, None)
    spec, _, _ = scene.started()
    (name,) = scene.farm.ledger.allocation_ids(spec.episode_id)
    scene.farm.redis.hincrby(Keys.allocation(name), "created_at", -600_000)
    with opened_farm(
        scene.farm.settings.redis_url or "", vcpu_usd_per_second=0.00014, gib_usd_per_second=0.000045
    ) as dear:
        assert burn_picousd_per_hour(dear.ledger.allocations.running()) == 3600 * PRICE
        _, accrued = Spending(dear.ledger, Receipts(dear.redis, dear.ledger.allocations)).bills(By.RUN, ReceiptFilter())
        assert 600 * PRICE <= accrued.cost_picousd <= 611 * PRICE
        dear.ledger.allocations.sized(stored(dear, name), vcpus=2, memory_mb=1024)
        assert books(dear, None) == (0, 731 * 32_500_000), "a larger one is reserved for at the worker's rates as well"
        scene.ledger = LaterLedger(dear.redis, dear.ledger.allocations, retention_seconds=3600)
        reconciler = scene.watcher("reconciler-dear")
        scene.kill(spec)
        scene.pass_time(LEASE_SECONDS)
        reconciler.run_once()
        settled = dear.ledger.receipt(spec.episode_id)
        assert settled is not None
        spent, reserved = books(dear, None)
        assert (spent, reserved) == (settled.cost_picousd, 0)
        assert 600 * 32_500_000 <= spent <= WORST
        assert cast("str", dear.redis.hget(Keys.COUNTERS, "cost_picousd:policy")) == str(spent)


def test_rates_and_the_default_size_are_settings(redis_url: str) -> None:
    changes = {"vcpu_usd_per_second": 0.00002, "gib_usd_per_second": 0, "default_vcpus": 4}
    with opened_farm(redis_url, **changes) as farm:
        episode = running(farm)
        assert books(farm) == (0, 731 * 80_000_000)
        end(farm, episode)


def test_free_sandboxes_need_no_budget(redis_url: str) -> None:
    with opened_farm(redis_url, vcpu_usd_per_second=0, gib_usd_per_second=0) as farm:
        limit(farm, 0)
        episode = running(farm)
        assert books(farm) == (0, 0)
        end(farm, episode)


@pytest.mark.parametrize("amount", ["", "much", "-1", "nan", "inf", "1e9", "1000001", "1e-13", "9e-13"])
def test_an_amount_that_is_none_is_refused_and_changes_nothing(farm: Farm, amount: str) -> None:
    limit(farm, 5)
    with pytest.raises(SettingsError, match="US dollars"):
        farm.budget.set(amount, run_id=RUN)
    assert farm.budget.read(RUN).limit_picousd == 5


@pytest.mark.parametrize(
    ("amount", "picousd"),
    [("2.50", 25 * 10**11), ("$1", 10**12), (0.1, 10**11), (Decimal("0.000000000001"), 1), ("0", 0), (3, 3 * 10**12)],
)
def test_an_amount_is_exact(amount: str | float | Decimal, picousd: int) -> None:
    assert parse_usd(amount, name="it") == picousd


def test_a_runs_books_are_forgotten_long_after_its_last_movement(farm: Farm, redis: Redis) -> None:
    limit(farm, WORST)
    assert redis.ttl(Keys.budget(RUN)) > 89 * 86_400
    redis.expire(Keys.budget(RUN), 1000)
    episode = running(farm)
    assert redis.ttl(Keys.budget(RUN)) > 89 * 86_400
    assert redis.ttl(Keys.budget(None)) == -1
    end(farm, episode)
