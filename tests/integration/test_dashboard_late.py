"""Sandboxes that are settled after their episode's receipt: the page's costs come to what the receipts say."""

from __future__ import annotations

from itertools import count

import pytest
from redis import Redis

from orchestrator.allocations import RECONCILER_TOKEN
from orchestrator.dashboard.history import RING, Ended
from orchestrator.dashboard.lookout import Lookout
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.records import Allocation
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import a_receipt, a_spec, intended, leased

HOUR = 3600
PRICE = 30_250_000
"""Pico-dollars a second of 2 vCPU and 512 MiB at list prices."""


def late(farm: Farm, *roles: Role) -> list[Allocation]:
    """Sandboxes of an episode that ended without their deletion having been answered."""
    spec, lease = leased(farm)
    rows = []
    for role in roles:
        row = intended(farm, spec, lease, role)
        farm.ledger.allocations.created(row, f"sandbox-{row.allocation_id}", lease.token, creating_ms=10)
        row = farm.ledger.allocations.sized(row, vcpus=2, memory_mb=512).row
        farm.ledger.allocations.unresolved(row, lease.token, "the deletion was not answered")
        rows.append(row)
    now, names = farm.ledger.now(), tuple(row.allocation_id for row in rows)
    receipt = a_receipt(spec, Outcome.CLEANUP_UNRESOLVED, allocations=names, queued_at=now - 5, finished_at=now)
    farm.ledger.commit(receipt, lease.token)
    farm.redis.zincrby(Keys.RECEIPTS, -HOUR * 1000, spec.episode_id)  # out of the reach of a look for new ones
    return rows


def settle(farm: Farm, row: Allocation) -> None:
    farm.ledger.allocations.absent(row, RECONCILER_TOKEN, running_ms=10_000)


def looking(farm: Farm) -> Lookout:
    """One that has looked, and does so anew at every view."""
    ticks = count()
    lookout = Lookout(farm, clock=lambda: float(next(ticks)))
    shown(lookout)
    return lookout


def shown(lookout: Lookout) -> tuple[Ended, ...]:
    look = lookout.view().look
    assert look is not None
    return look.ended


def costs(lookout: Lookout) -> int:
    return sum(one.cost_picousd for one in shown(lookout))


@pytest.mark.parametrize("settled", [range(300), range(299, 300), range(0, 300, 2)], ids=["all", "oldest", "some"])
def test_every_late_settlement_reaches_the_costs_however_many_there_are(farm: Farm, settled: range) -> None:
    rows = [late(farm, Role.POLICY)[0] for _ in range(300)][::-1]  # newest first, as they are shown
    lookout = looking(farm)
    assert costs(lookout) == 0
    for place in settled:
        settle(farm, rows[place])
    assert costs(lookout) == len(settled) * 10 * PRICE
    assert sum(one.settled for one in shown(lookout)) == len(settled)


def test_of_two_sandboxes_each_is_counted_when_it_is_settled(farm: Farm) -> None:
    policy, verifier = late(farm, Role.POLICY, Role.VERIFIER)
    lookout = looking(farm)
    for done, row in enumerate((verifier, policy), start=1):
        settle(farm, row)
        assert costs(lookout) == done * 10 * PRICE


def test_an_episode_goes_with_its_receipt(farm: Farm, redis: Redis) -> None:
    (kept,), (row,) = late(farm, Role.POLICY), late(farm, Role.POLICY)
    lookout = looking(farm)
    settle(farm, row)
    redis.delete(Keys.receipt(row.episode_id))  # as its end does
    assert [one.episode_id for one in shown(lookout)] == [kept.episode_id]
    settle(farm, kept)
    assert costs(lookout) == 10 * PRICE


def test_nothing_is_shown_of_a_redis_that_was_emptied(farm: Farm, redis: Redis) -> None:
    late(farm, Role.POLICY)
    lookout = looking(farm)
    assert len(shown(lookout)) == 1
    redis.flushdb()
    assert shown(lookout) == ()


def test_an_id_that_was_run_again_is_shown_as_it_ended_last(farm: Farm, redis: Redis) -> None:
    spec = a_spec("e-again")
    lookout = Lookout(farm, clock=map(float, count()).__next__)
    for outcome in (Outcome.CANCELLED, Outcome.SOLVED):
        redis.delete(Keys.receipt(spec.episode_id), Keys.episode(spec.episode_id))  # as their common end does
        _, lease = leased(farm, spec)
        now = farm.ledger.now()
        farm.ledger.commit(a_receipt(spec, outcome, queued_at=now - 1, finished_at=now), lease.token)
        assert [one.outcome for one in shown(lookout)] == [outcome]


def test_a_full_ring_takes_older_ones_in_the_places_of_those_that_are_gone(farm: Farm, redis: Redis) -> None:
    begin, pipeline = farm.ledger.now() - HOUR, redis.pipeline(transaction=False)
    names = [f"e-{number:05d}" for number in range(RING + 30)]
    for number, name in enumerate(names):
        receipt = a_receipt(a_spec(name), queued_at=begin + number - 1, finished_at=begin + number)
        pipeline.set(Keys.receipt(name), receipt.model_dump_json(), ex=1000)
        pipeline.zadd(Keys.RECEIPTS, {name: int(1000 * (begin + number))})
    pipeline.execute()
    lookout = looking(farm)
    redis.delete(*map(Keys.receipt, names[100:110]))  # of a process that keeps them for a shorter time
    seen = [one.episode_id for one in shown(lookout)]
    assert seen == [*names[110:][::-1], *names[20:100][::-1]]
