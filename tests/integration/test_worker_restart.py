"""A worker that was killed and is started again under the same id: it takes its place at once, and only then."""

from __future__ import annotations

import os
import re
import socket

from orchestrator.pool import Pool
from orchestrator.presence import WorkerRow
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.farm"]


def test_a_killed_worker_started_again_under_its_id_has_its_slots_at_once(field: Field) -> None:
    first = field.worker("w1")
    first.process.kill()
    wait_until(lambda: not first.alive(), description="all of it is gone")
    second = field.worker("w1")
    assert set(second.slots()) == {"w1-1.2", "w1-2.2"}, "RQ lists the dead ones for a while"
    assert "started again" not in second.stderr, "no slot died of a name that was taken"
    assert sorted(field.farm.presence.live_slots()) == ["w1-1", "w1-2"]
    with Pool(field.settings) as pool:
        episode = pool.submit(weekly_sales(), policy=script(candidate(repaired())))
        assert episode.wait(30).outcome is Outcome.SOLVED


def test_a_row_with_a_pid_that_is_anothers_by_now_keeps_no_worker_from_starting(ground: Ground) -> None:
    """As of a container that was killed and is started again: there every process has the pid that it had before."""
    row = WorkerRow("w1", socket.gethostname(), os.getpid(), "running", 2, "http://127.0.0.1:1")
    with open_field(ground, lease_lost_seconds=4, lease_renew_seconds=1) as field:
        field.farm.presence.beat_worker(row, ["w1-1", "w1-2"])
        started = field.worker("w1")
        [row] = field.farm.presence.workers()
        assert row.pid == started.pid


def test_a_second_worker_of_an_id_that_lives_is_refused_soon(field: Field) -> None:
    field.worker("w1")
    second = field.start_worker("w1")
    assert second.wait(30) != 0
    assert re.search(r"worker w1 on \S+ is alive \(pid \d+\); take another id, or end that one first", second.stderr)
    assert len(field.workers[0].slots()) == 2
