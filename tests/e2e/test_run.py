"""`rollout-farm run`: receipts as JSON lines, errors as one line with a code, and nothing left after a Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.embedded import LocalSandboxes
from deploy.exit_codes import ExitCode
from orchestrator.keys import Keys
from orchestrator.tasks import load_builtin
from tests.e2e.commands import User, user
from tests.support import warm
from tests.support.policies import weekly_sales
from tests.support.waiting import wait_until


@pytest.fixture
def someone() -> Iterator[User]:
    with user() as made:
        yield made


def one_line(text: str) -> str:
    """The one error that a command ended with."""
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    assert lines[0].startswith("error: ")
    return lines[0]


def test_four_episodes_give_four_json_lines(someone: User) -> None:
    code, process = someone.run("run", "weekly-sales", "--episodes", "4", "--workers", "1")
    assert code == ExitCode.OK, process.stderr
    receipts = [json.loads(line) for line in process.stdout.splitlines()]
    assert sorted(receipt["outcome"] for receipt in receipts) == ["solved"] * 2 + ["wrong_answer"] * 2
    assert all(row["absent_at"] for receipt in receipts for row in receipt["allocations"])
    assert "4 of 4" not in process.stderr
    assert process.stderr.count("2 of 2") == 4  # the table: sandboxes gone


def test_a_proxy_that_the_environment_names_is_not_asked_for_what_runs_here(someone: User) -> None:
    proxy = "http://127.0.0.1:1"  # nothing listens there
    proxies = {"HTTP_PROXY": proxy, "http_proxy": proxy, "ALL_PROXY": proxy, "NO_PROXY": "", "no_proxy": ""}
    process = someone.start("run", "weekly-sales", "--script", "repair", "--workers", "1", **proxies)
    assert process.wait(60) == ExitCode.OK, process.stderr
    assert json.loads(process.stdout)["outcome"] == "solved"


def test_a_redis_that_is_not_there_is_one_clear_line(someone: User) -> None:
    code, process = someone.run("run", "weekly-sales", REDIS_URL="redis://:secret@127.0.0.1:1/0")
    assert code == ExitCode.REDIS
    line = one_line(process.stderr)
    assert "no Redis at redis://:***@127.0.0.1:1/0" in line
    assert "secret" not in line
    assert process.stdout == ""


@pytest.mark.parametrize("command", [("worker",), ("status",), ("orchestrator",), ("reconcile",)])
def test_every_command_says_the_same_of_it(someone: User, command: tuple[str, ...]) -> None:
    code, process = someone.run(*command, template=warm.farm(), REDIS_URL="redis://127.0.0.1:1/0", E2B_API_KEY="k")
    assert code == ExitCode.REDIS
    assert "correct REDIS_URL" in one_line(process.stderr)


def test_a_wrong_task_file_is_named_with_its_line_before_anything_is_started(someone: User) -> None:
    (someone.home / "task.json").write_text('{"schema_version": 1,\n "id": "x",\n "promt": "?"}')
    code, process = someone.run("run", "task.json", template=warm.farm())
    assert code == ExitCode.TASK
    assert "task.json:3" in process.stderr
    assert "promt" in process.stderr
    assert "Traceback" not in process.stderr
    code, process = someone.run("run", "nowhere.json", template=warm.farm())
    assert code == ExitCode.TASK
    assert "nowhere.json" in one_line(process.stderr)


def test_a_script_that_no_task_has_is_named(someone: User) -> None:
    code, process = someone.run("run", "weekly-sales", "--script", "nothing", template=warm.farm())
    assert code == ExitCode.TASK
    assert "it has: buggy, repair" in one_line(process.stderr)


def test_a_task_without_scripts_says_what_to_do(someone: User) -> None:
    task = load_builtin("weekly-sales").model_copy(update={"scripts": {}})
    (someone.home / "task.json").write_text(task.model_dump_json())
    code, process = someone.run("run", "task.json", template=warm.farm())
    assert code == ExitCode.TASK
    said = one_line(process.stderr)
    assert 'weekly-sales: it has no script to run. Add one under "scripts", or let a model act' in said


def test_a_wrong_setting_is_named(someone: User) -> None:
    code, process = someone.run("run", "weekly-sales", template=warm.farm(), FARM_CONCURRENCY_LIMIT="many")
    assert code == ExitCode.SETTINGS
    assert "FARM_CONCURRENCY_LIMIT" in one_line(process.stderr)


@pytest.mark.parametrize("moment", ["starting", "running"])
def test_ctrl_c_leaves_nothing(someone: User, moment: str) -> None:
    task = weekly_sales(scripts={"slow": ("sleep 1",) * 30})
    (someone.home / "task.json").write_text(task.model_dump_json())
    process = someone.start("run", "task.json", "--episodes", "3", "--workers", "1", FARM_DRAIN_SECONDS="0.5")
    redis = wait_until(someone.redis, description="the embedded Redis", seconds=30)
    assert redis is not None
    with redis:
        if moment == "running":
            wait_until(lambda: redis.zcard(Keys.ALLOCATIONS) == 2, description="two sandboxes", seconds=30)
    process.interrupt_group()
    assert process.wait(30) == ExitCode.INTERRUPTED, process.stderr
    assert "Traceback" not in process.stderr


def test_a_second_ctrl_c_does_not_wait_for_what_runs(someone: User) -> None:
    task = weekly_sales(scripts={"slow": ("sleep 1",) * 60})
    (someone.home / "task.json").write_text(task.model_dump_json())
    process = someone.start("run", "task.json", "--workers", "1")
    redis = wait_until(someone.redis, description="the embedded Redis", seconds=30)
    assert redis is not None
    with redis:
        wait_until(lambda: redis.zcard(Keys.ALLOCATIONS), description="a sandbox", seconds=30)
        process.interrupt_group()
        wait_until(
            lambda: [redis.hget(key, "state") for key in redis.scan_iter("farm:worker:*")] == ["draining"],
            description="the worker drains",
        )
        process.interrupt_group()
    assert process.wait(20) == ExitCode.INTERRUPTED, process.stderr
    assert "Traceback" not in process.stderr


def test_a_wrong_key_is_one_line_with_its_code(someone: User, tmp_path: Path) -> None:
    with LocalSandboxes(tmp_path, api_key="the-right-one") as service:
        code, process = someone.run("run", "weekly-sales", E2B_API_KEY="wrong", FARM_E2B_API_URL=service.url)
    assert code == ExitCode.PROVIDER
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert "E2B_API_KEY" in line
    assert "ended with" not in process.stderr
