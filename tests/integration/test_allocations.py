"""Sandboxes in the ledger: intent first, along the table only, under the token only, with exact money."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import cast

import pytest
from redis import Redis

from orchestrator.allocations import RECONCILER_TOKEN
from orchestrator.errors import FarmError, LeaseLost
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.records import Allocation
from orchestrator.vocabulary import TRANSITIONS, AllocationState, Outcome, Role
from tests.support.bare_farm import a_receipt, a_request, a_spec, expire, intended, leased, stored

ROUTES: dict[AllocationState, tuple[AllocationState, ...]] = {
    AllocationState.INTENDED: (),
    AllocationState.CREATED: (AllocationState.CREATED,),
    AllocationState.UNKNOWN: (AllocationState.UNKNOWN,),
    AllocationState.UNRESOLVED: (AllocationState.CREATED, AllocationState.UNRESOLVED),
    AllocationState.ABSENT: (AllocationState.CREATED, AllocationState.ABSENT),
    AllocationState.REFUSED: (AllocationState.REFUSED,),
    AllocationState.EXPIRED: (AllocationState.UNKNOWN, AllocationState.EXPIRED),
}
"""How a fresh intent gets into each state."""


def move(farm: Farm, row: Allocation, state: AllocationState, token: str) -> None:
    moves: dict[AllocationState, Callable[[], None]] = {
        AllocationState.CREATED: lambda: farm.ledger.allocations.created(row, "sbx1", token, creating_ms=0),
        AllocationState.UNKNOWN: lambda: farm.ledger.allocations.unknown(row, token, "lost"),
        AllocationState.REFUSED: lambda: farm.ledger.allocations.refused(row, token, "429"),
        AllocationState.UNRESOLVED: lambda: farm.ledger.allocations.unresolved(row, token, "500"),
        AllocationState.EXPIRED: lambda: farm.ledger.allocations.expired(row, token, "over"),
        AllocationState.ABSENT: lambda: farm.ledger.allocations.absent(row, token, running_ms=1000),
    }
    moves[state]()


def counters(redis: Redis) -> dict[str, str]:
    return cast("dict[str, str]", redis.hgetall(Keys.COUNTERS))


def unsettled(farm: Farm, episode_id: str) -> int:
    row = farm.ledger.row(episode_id)
    assert row is not None
    return row.unsettled


@pytest.mark.parametrize(
    ("origin", "target"),
    list(itertools.product(AllocationState, set(AllocationState) - {AllocationState.INTENDED})),
)
def test_a_state_changes_only_along_the_table(
    farm: Farm, redis: Redis, origin: AllocationState, target: AllocationState
) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    for step in ROUTES[origin]:
        move(farm, row, step, lease.token)
    before = counters(redis)
    if target in TRANSITIONS[origin]:
        move(farm, row, target, lease.token)
        assert stored(farm, row.allocation_id).state is target
        assert unsettled(farm, spec.episode_id) == (0 if target.settled else 1)
        assert (redis.zcard(Keys.ALLOCATIONS) == 0) is target.settled
        assert (redis.ttl(Keys.allocation(row.allocation_id)) > 0) is target.settled
        return
    if origin is target:
        move(farm, row, target, lease.token)  # said again
    else:
        with pytest.raises(FarmError) as refused:
            move(farm, row, target, lease.token)
        assert not isinstance(refused.value, LeaseLost)
    assert stored(farm, row.allocation_id).state is origin
    assert counters(redis) == before
    assert unsettled(farm, spec.episode_id) == (0 if origin.settled else 1)


def test_the_intent_is_written_with_the_exact_request(farm: Farm) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    assert row.state is AllocationState.INTENDED
    assert farm.ledger.allocations.request(row.allocation_id) == a_request(spec)
    assert farm.ledger.allocation_ids(spec.episode_id) == (row.allocation_id,)
    assert farm.ledger.allocations.unsettled() == [row]


def test_intending_again_changes_nothing(farm: Farm) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    assert intended(farm, spec, lease) == row
    assert unsettled(farm, spec.episode_id) == 1
    assert farm.ledger.allocation_ids(spec.episode_id) == (row.allocation_id,)


def test_nothing_can_be_created_without_an_intent(farm: Farm) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease).model_copy(update={"allocation_id": "never-intended"})
    with pytest.raises(FarmError):
        farm.ledger.allocations.created(row, "sbx1", lease.token, creating_ms=0)
    assert farm.ledger.allocations.get("never-intended") is None


def test_an_intent_needs_the_lease(farm: Farm, redis: Redis) -> None:
    spec = a_spec()
    farm.ledger.open(spec)
    for token in ("1", "", RECONCILER_TOKEN):
        with pytest.raises(LeaseLost):
            farm.ledger.allocations.intend(spec.episode_id, Role.POLICY, a_request(spec), token)
    spec, lease = leased(farm)
    expire(redis, spec.episode_id)
    farm.ledger.seize(spec.episode_id, "reconciler", lease_seconds=30)
    with pytest.raises(LeaseLost):
        farm.ledger.allocations.intend(spec.episode_id, Role.POLICY, a_request(spec), lease.token)
    assert farm.ledger.allocations.unsettled() == []


@pytest.mark.parametrize("state", sorted(set(AllocationState) - {AllocationState.INTENDED}))
def test_no_state_changes_under_a_lost_token(farm: Farm, redis: Redis, state: AllocationState) -> None:
    origin = next(origin for origin, following in TRANSITIONS.items() if state in following)
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    for step in ROUTES[origin]:
        move(farm, row, step, lease.token)
    expire(redis, spec.episode_id)
    token = farm.ledger.seize(spec.episode_id, "reconciler", lease_seconds=30)
    assert token is not None
    before = redis.hgetall(Keys.allocation(row.allocation_id))
    for refused in (lease.token, RECONCILER_TOKEN, ""):
        with pytest.raises(LeaseLost):
            move(farm, row, state, refused)
    assert redis.hgetall(Keys.allocation(row.allocation_id)) == before
    move(farm, row, state, token)


def test_the_reconcilers_token_works_once_the_episode_has_its_receipt(farm: Farm) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    move(farm, row, AllocationState.UNKNOWN, lease.token)
    with pytest.raises(LeaseLost):
        move(farm, row, AllocationState.CREATED, RECONCILER_TOKEN)
    farm.ledger.commit(a_receipt(spec, Outcome.TRANSPORT), lease.token)
    move(farm, row, AllocationState.CREATED, RECONCILER_TOKEN)
    move(farm, row, AllocationState.ABSENT, RECONCILER_TOKEN)
    assert farm.ledger.allocations.unsettled() == []


def test_saying_unknown_again_prolongs_what_may_live(farm: Farm, redis: Redis) -> None:
    """A second creation may have been sent: its longest life counts from then."""
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.unknown(row, lease.token, "lost")
    redis.hset(Keys.allocation(row.allocation_id), "unknown_at", 1)
    farm.ledger.allocations.unknown(row, lease.token, "lost again")
    unknown_at = stored(farm, row.allocation_id).unknown_at
    assert unknown_at is not None
    assert abs(unknown_at - farm.ledger.now()) < 5


def test_money_is_exact_and_moves_once_with_the_settlement(farm: Farm, redis: Redis) -> None:
    dice = random.Random(4)
    rates = farm.settings
    spent, ran = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
    for _ in range(25):
        spec, lease = leased(farm)
        for role in Role:
            row = intended(farm, spec, lease, role, longest_seconds=86_400)
            ms, vcpus, memory = dice.randrange(86_400_001), dice.randint(1, 64), dice.choice([128, 481, 512, 65_536])
            farm.ledger.allocations.created(row, "sbx1", lease.token, creating_ms=1)
            row = farm.ledger.allocations.sized(row, vcpus=vcpus, memory_mb=memory).row
            for _ in range(2):
                farm.ledger.allocations.absent(row, lease.token, running_ms=ms)
            per_second = Decimal(str(rates.vcpu_usd_per_second)) * vcpus
            per_second += Decimal(str(rates.gib_usd_per_second)) * memory / 1024
            oracle = int((per_second * ms * 10**9).to_integral_value(ROUND_HALF_UP))
            assert stored(farm, row.allocation_id).cost_picousd == oracle
            spent[role] += oracle
            ran[role] += ms
        farm.ledger.commit(a_receipt(spec, allocations=farm.ledger.allocation_ids(spec.episode_id)), lease.token)
    totals = counters(redis)
    for role in Role:
        assert int(totals[f"cost_picousd:{role}"]) == spent[role]
        assert int(totals[f"sandbox_ms:{role}"]) == ran[role]
        assert totals[f"created:{role}"] == "25"
    assert totals["cleanups:absent"] == "50"
    receipts = [farm.ledger.receipt(episode) for episode in map(str, redis.zrange(Keys.RECEIPTS, 0, -1))]
    assert sum(receipt.cost_picousd for receipt in receipts if receipt) == sum(spent.values())


def test_every_kind_of_cleanup_is_counted_once(farm: Farm, redis: Redis) -> None:
    for state, route in ROUTES.items():
        spec, lease = leased(farm)
        row = intended(farm, spec, lease)
        for step in route:
            move(farm, row, step, lease.token)
            move(farm, row, step, lease.token)
        assert stored(farm, row.allocation_id).state is state
    cleanups = {name: count for name, count in counters(redis).items() if name.startswith("cleanups:")}
    assert cleanups == {
        "cleanups:unresolved": "1",
        "cleanups:absent": "1",
        "cleanups:refused": "1",
        "cleanups:expired": "1",
    }


def test_times_are_those_of_the_sending_and_the_confirmation(farm: Farm) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.created(row, "sbx1", lease.token, creating_ms=5000)
    farm.ledger.allocations.absent(row, lease.token, running_ms=7000)
    done = stored(farm, row.allocation_id)
    assert done.created_at is not None
    assert done.absent_at is not None
    assert done.absent_at - done.created_at == pytest.approx(5, abs=1)
    assert done.running_seconds == 7
    assert done.sandbox_id == "sbx1"


def test_a_size_noted_late_brings_no_expired_row_back(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    redis.delete(Keys.allocation(row.allocation_id))  # as its retention does
    farm.ledger.allocations.sized(row, vcpus=2, memory_mb=512)
    assert not redis.exists(Keys.allocation(row.allocation_id))
    redis.zrem(Keys.ALLOCATIONS, row.allocation_id)
    farm.ledger.commit(a_receipt(spec), lease.token)


def test_a_sandboxs_row_outlives_a_receipt_that_is_written_long_after_it(farm: Farm, redis: Redis) -> None:
    spec, lease = leased(farm)
    row = intended(farm, spec, lease)
    farm.ledger.allocations.refused(row, lease.token, "nothing was made")
    of_row = Keys.allocation(row.allocation_id)
    redis.expire(of_row, redis.ttl(of_row) - 1800)  # the verifier waited for half an hour
    farm.ledger.commit(a_receipt(spec, allocations=(row.allocation_id,)), lease.token)
    assert redis.ttl(Keys.receipt(spec.episode_id)) < redis.ttl(of_row)
