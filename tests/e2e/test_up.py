"""`rollout-farm up`, and the commands that find it by its directory."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.exit_codes import ExitCode
from orchestrator.keys import Keys
from orchestrator.pool import Pool
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome
from tests.e2e.commands import User, user
from tests.support.policies import candidate, repaired, script, weekly_sales
from tests.support.processes import Marked, children
from tests.support.waiting import wait_until


@pytest.fixture
def someone() -> Iterator[User]:
    with user() as made:
        yield made


@pytest.fixture
def up(someone: User) -> Marked:
    """A farm of one worker, up."""
    process = someone.start("up", "--workers", "1")
    wait_until(lambda: "are up" in process.stdout, description="the farm is up", seconds=40)
    return process


def left(someone: User) -> list[str]:
    """What the state directory still holds besides data and logs."""
    state = someone.home / ".farm"
    kept = {"redis", "logs", "sandboxes.log"}
    return [path.name for path in state.iterdir() if path.name not in kept]


def test_status_and_run_find_it_and_ctrl_c_ends_all_of_it(someone: User, up: Marked) -> None:
    code, status = someone.run("status", "--json")
    assert code == ExitCode.OK, status.stderr
    reading = json.loads(status.stdout)
    assert reading["capacity"]["live_slots"] == 2
    assert reading["capacity"]["free"] == 2
    assert [row["state"] for row in reading["workers"]] == ["running"]
    assert reading["unresolved"] == []
    assert reading["open_episodes"] == 0

    code, process = someone.run("run", "weekly-sales", "--episodes", "2")
    assert code == ExitCode.OK, process.stderr
    code, status = someone.run("status", "--json")
    assert json.loads(status.stdout)["outcomes"] == {"solved": 1, "wrong_answer": 1}
    code, status = someone.run("status")
    assert "workers     1 on 1 host (2 live slots, 0 busy)" in status.stdout

    found = json.loads((someone.home / ".farm" / "stack.json").read_text())
    settings = Settings(_env_file=None, redis_url=found["redis_url"])  # type: ignore[call-arg]
    with Pool(settings) as pool:
        episode = pool.submit(weekly_sales(), policy=script("sleep 1.5", candidate(repaired())))
        wait_until(lambda: pool.redis.zcard(Keys.ALLOCATIONS), description="its sandbox")
        up.interrupt_group()
        assert episode.wait(20).outcome is Outcome.SOLVED, "what runs is finished first"
    assert up.wait(30) == ExitCode.OK, up.stderr
    assert left(someone) == []
    code, status = someone.run("status")
    assert code == ExitCode.REDIS
    assert "rollout-farm up" in status.stderr


def test_a_killed_up_takes_everything_along(someone: User, up: Marked) -> None:
    assert len(up.alive()) > 4
    up.process.kill()
    up.process.wait()
    wait_until(lambda: not up.alive(), description="no process is left", seconds=30)


def test_a_dead_worker_ends_up_with_its_reason(someone: User, up: Marked) -> None:
    def supervisors() -> list[int]:
        return [pid for pid in children(up.pid) if b"\0worker\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    (worker,) = supervisors()
    os.kill(worker, signal.SIGKILL)
    assert up.wait(30) == ExitCode.FAILED
    assert "workers ended with -9" in up.stderr
    assert left(someone) == []
