"""The farm at a glance: what the rows say, and nothing else."""

from __future__ import annotations

import json

import pytest

from orchestrator.farm import Farm
from orchestrator.settings import Settings
from orchestrator.status import Status, read_status
from orchestrator.vocabulary import AllocationState, Outcome, Role
from tests.support.truth import a_receipt, a_spec, admit, beat_slots, farm_settings, intended, leased


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=5)


def status(farm: Farm) -> Status:
    return read_status(farm)


def test_an_empty_farm_has_nothing(farm: Farm) -> None:
    seen = status(farm)
    assert (seen.queued_jobs, seen.open_episodes, seen.running_episodes) == (0, 0, 0)
    assert (seen.workers, seen.outcomes, seen.unresolved) == ((), {}, ())


def test_everything_is_counted_from_the_rows(farm: Farm) -> None:
    beat_slots(farm, 4)
    queued = a_spec()
    farm.ledger.open(queued)
    farm.queue.enqueue(queued)
    done, done_lease = leased(farm)
    farm.ledger.commit(a_receipt(done, Outcome.SOLVED), done_lease.token)
    running, lease = leased(farm)
    admit(farm, running.episode_id)
    rows = [intended(farm, running, lease, role) for role in Role]
    farm.ledger.allocations.unknown(rows[0], lease.token, "its answer was lost")
    seen = status(farm)
    assert (seen.queued_jobs, seen.open_episodes, seen.running_episodes) == (1, 2, 1)
    assert seen.outcomes == {"solved": 1}
    assert [(row.allocation_id, row.state) for row in seen.unresolved] == [
        (rows[0].allocation_id, AllocationState.UNKNOWN)
    ]
    assert (seen.capacity.live_slots, seen.capacity.permits, seen.capacity.free) == (4, 1, 3)
    assert [row.worker_id for row in seen.workers] == ["worker-test"]
    shown = json.loads(json.dumps(seen.as_json()))
    assert shown["capacity"]["free"] == 3
    assert shown["unresolved"][0]["detail"] == "its answer was lost"
