"""The farm at a glance: what the rows say, and nothing else."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import cast

import pytest

from deploy.exit_codes import ExitCode
from orchestrator.farm import Farm
from orchestrator.presence import Presence, WorkerRow
from orchestrator.settings import Settings
from orchestrator.status import Status, read_status
from orchestrator.vocabulary import AllocationState, Outcome, Role
from tests.support import warm
from tests.support.bare_farm import a_receipt, a_spec, admit, beat_slots, farm_settings, intended, leased
from tests.support.processes import worker_environment


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
    farm.queue.named("another").enqueue(queued)
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


def test_a_reading_looks_through_no_foreign_keys_and_sees_a_draining_worker(farm: Farm) -> None:
    def scans() -> int:
        stats = cast("dict[str, dict[str, int]]", farm.redis.info("commandstats"))
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("scan", "keys"))

    farm.presence.beat_worker(WorkerRow("worker-a", "host-a", 1, "draining", 2, "http://127.0.0.1:1"), [])
    before = scans()
    assert [(row.worker_id, row.state) for row in status(farm).workers] == [("worker-a", "draining")]
    assert scans() == before


def test_a_hosts_own_workers_are_those_with_a_live_slot(farm: Farm) -> None:
    def beat(name: str, host: str, *slots: str) -> None:
        farm.presence.beat_worker(WorkerRow(name, host, 1, "running", 2, "http://127.0.0.1:1"), [*slots])

    assert farm.presence.taking("host-a") == []
    beat("worker-a", "host-a", "worker-a-1", "worker-a-2")
    beat("restarted-1", "host-a", "restarted-1-1.3")
    beat("draining", "host-a")
    beat("worker-b", "host-b", "worker-b-1")
    assert farm.presence.taking("host-a") == ["restarted-1", "worker-a"]
    farm.presence.remove_worker("worker-a", ["worker-a-1", "worker-a-2"])
    assert farm.presence.taking("host-a") == ["restarted-1"]


def test_a_probe_asks_whether_a_worker_of_this_host_takes_episodes(
    farm: Farm, settings: Settings, tmp_path: Path
) -> None:
    def probe() -> subprocess.CompletedProcess[str]:
        command = [*warm.FARM_COMMAND, "status", "--here"]
        return warm.farm().run(command, env=worker_environment(settings), cwd=tmp_path)

    none = probe()
    assert (none.returncode, none.stdout) == (ExitCode.FAILED, "")
    assert socket.gethostname() in none.stderr
    row = WorkerRow("worker-a", socket.gethostname(), 1, "running", 2, "http://127.0.0.1:1")
    Presence(farm.redis, slot_seconds=60, trainer_seconds=30).beat_worker(row, ["worker-a-1"])
    there = probe()
    assert (there.returncode, there.stdout, there.stderr) == (ExitCode.OK, "worker-a\n", "")
