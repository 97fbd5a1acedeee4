"""`rollout-farm demo`: the promise of the first screen, kept from any directory; and its own check of that promise."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.commands.demo import check_demo, demo_settings
from orchestrator.records import Allocation, SettledReceipt
from orchestrator.vocabulary import Phase
from tests.e2e.commands import COMMAND, User, user
from tests.support.processes import ROOT, Marked
from tests.support.waiting import wait_until

PRODUCTION = """
FARM_REDIS_CERTIFICATE_FILE=/nowhere/farm.pem
FARM_METRICS_HOST=0.0.0.0
FARM_TRANSCRIPT_BYTES=0
FARM_QUEUE=production
FARM_PLAN=hobby
FARM_CONCURRENCY_LIMIT=1
FARM_CREATION_RATE=0.001
FARM_STATE_DIR=/nowhere/state
"""
"""The `.env` of a farm whose demo would fail, or wait for a quarter of an hour, with any line of it."""

VISIBLE = {"east": 15, "west": 7}


@pytest.fixture(scope="module")
def demo() -> tuple[str, list[dict[str, Any]]]:
    """What a demo printed, run from a directory with packages of our names and a production farm's settings."""
    with user() as someone, socket.create_server(("127.0.0.1", 0)) as taken:
        authority = someone.home / "ca.pem"
        authority.touch()
        (someone.home / ".env").write_text(PRODUCTION)
        for name in ("deploy", "orchestrator", "workers", "redis"):
            (someone.home / name).mkdir()
            (someone.home / name / "__init__.py").write_text("raise ImportError('not this one')\n")
        before = sorted(path.name for path in someone.home.iterdir())
        code, process = someone.run(
            "demo",
            REDIS_URL="rediss://127.0.0.1:1/0",
            FARM_REDIS_CA_FILE=str(authority),
            FARM_METRICS_PORT=str(taken.getsockname()[1]),
            E2B_API_KEY="not a key",
            FARM_E2B_API_URL="http://127.0.0.1:1",
            FARM_TEMPLATE="my-template",
            HTTP_PROXY="http://127.0.0.1:1",
        )
        assert code == 0, process.stderr
        assert sorted(path.name for path in someone.home.iterdir()) == before
        receipts, _ = json.JSONDecoder().raw_decode(process.stdout)
        return process.stdout, receipts


def test_it_prints_receipts_with_everything_it_promises(demo: tuple[str, list[dict[str, Any]]]) -> None:
    printed, receipts = demo
    assert [receipt["reward"] for receipt in receipts] == [0.0, 1.0]
    assert [receipt["outcome"] for receipt in receipts] == ["wrong_answer", "solved"]
    rows = [row for receipt in receipts for row in receipt["allocations"]]
    assert [row["role"] for row in rows] == ["policy", "verifier"] * 2
    assert len({row["sandbox_id"] for row in rows}) == 4
    assert all(row["state"] == "absent" and row["absent_at"] for row in rows)
    for policy, verifier in (rows[:2], rows[2:]):
        assert policy["absent_at"] <= verifier["created_at"]
    for receipt in receipts:
        assert set(receipt["phases"]) == {str(phase) for phase in Phase}
        assert receipt["sizes"]["artifact"] > 0
        assert float(receipt["cost_usd"]) > 0
    assert json.dumps(VISIBLE) in printed


def settled(demo: tuple[str, list[dict[str, Any]]]) -> list[SettledReceipt]:
    """The printed receipts, read back."""
    read = []
    for printed in demo[1]:
        body = {name: value for name, value in printed.items() if name != "cost_usd"}
        rows = tuple(Allocation.model_validate(row) for row in body["allocations"])
        body["allocations"] = [row.allocation_id for row in rows]
        read.append(SettledReceipt.model_validate({"receipt": body, "allocations": rows}))
    return read


Change = Callable[[dict[str, Any], list[dict[str, Any]]], object]
"""Doctors the second receipt and its allocations, as plain data."""

BROKEN: dict[str, tuple[Change, str]] = {
    "a reward": (lambda receipt, rows: receipt.update(outcome="wrong_answer", reward=0.0), "rewards are [0.0, 0.0]"),
    "a score": (lambda receipt, rows: receipt.update(outcome="transport", reward=None), "rewards are [0.0, None]"),
    "a verifier": (
        lambda receipt, rows: rows.pop(),
        "sandboxes were ['policy', 'policy', 'verifier'], not two policies and two verifiers",
    ),
    "its own id": (lambda receipt, rows: rows[1].update(sandbox_id=rows[0]["sandbox_id"]), "not all different"),
    "any id": (lambda receipt, rows: rows[1].update(sandbox_id=None), "not all different"),
    "its absence": (lambda receipt, rows: rows[1].update(absent_at=None, state="unresolved"), "not confirmed absent"),
    "the time of it": (lambda receipt, rows: rows[0].update(absent_at=None), "not confirmed absent"),
    "a duration": (lambda receipt, rows: receipt["phases"].pop("verify"), "no duration for ['verify']"),
    "a size": (lambda receipt, rows: receipt["sizes"].pop("artifact"), "no artifact size"),
    "the order": (
        lambda receipt, rows: rows[0].update(absent_at=rows[1]["created_at"] + 1),
        "was there when its verifier was created",
    ),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_the_check_misses(demo: tuple[str, list[dict[str, Any]]], promise: str) -> None:
    first, second = settled(demo)
    change, problem = BROKEN[promise]
    body, rows = second.receipt.model_dump(), [row.model_dump() for row in second.allocations]
    change(body, rows)
    doctored = SettledReceipt.model_validate({"receipt": body, "allocations": rows})
    problems = check_demo([first, doctored], transcripts(first, doctored), visible=VISIBLE)
    assert any(problem in text for text in problems), problems


def transcripts(*receipts: SettledReceipt, printed: str = json.dumps(VISIBLE)) -> dict[str, list[dict[str, str]]]:
    """What the policies saw."""
    return {row.receipt.episode_id: [{"role": "observation", "text": printed}] for row in receipts}


def test_the_check_has_nothing_to_say_of_a_good_demo(demo: tuple[str, list[dict[str, Any]]]) -> None:
    receipts = settled(demo)
    assert check_demo(receipts, transcripts(*receipts), visible=VISIBLE) == []


@pytest.mark.parametrize("printed", ['{"east": 5, "west": 7}', "Traceback", ""])
def test_the_check_misses_the_repaired_output(demo: tuple[str, list[dict[str, Any]]], printed: str) -> None:
    receipts = settled(demo)
    problems = check_demo(receipts, transcripts(*receipts, printed=printed), visible=VISIBLE)
    assert len(problems) == 1
    assert "the repaired program printed" in problems[0]


def test_the_check_finds_a_demo_without_receipts_wanting() -> None:
    assert check_demo([], {}, visible=VISIBLE)


def test_budgets_are_heeded_so_that_the_demo_can_be_seen_to_fail() -> None:
    with user() as someone:
        code, process = someone.run("demo", FARM_BUDGETS__TRANSFER_BYTES="1")
        said = " ".join(process.stderr.split())
    assert code == 1
    assert "rewards are [0.0, 0.0], not [0.0, 1.0]" in said
    assert "sandboxes were ['policy', 'policy'], not two policies and two verifiers" in said


def test_a_host_without_jails_is_told_what_to_run_instead() -> None:
    with user() as someone:
        bwrap = someone.home / "bin" / "bwrap"
        bwrap.parent.mkdir()
        bwrap.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
        bwrap.chmod(0o755)
        code, process = someone.run("demo", PATH=f"{bwrap.parent}:{os.environ['PATH']}", E2B_API_KEY="e2b_abc")
        said = " ".join(process.stderr.split())
    assert code == 5
    assert "(bwrap: setting up uid map: Permission denied)" in said
    assert "rollout-farm run weekly-sales --episodes 2" in said


def test_a_sandbox_service_that_dies_is_told_with_what_it_logged_and_no_path_that_is_gone() -> None:
    with user() as someone:
        process = someone.start("demo")
        wait_until(lambda: _started(process, "deploy.cli"), description="workers are started", seconds=30)
        for pid in _started(process, "deploy.embedded.sandbox_child"):
            os.kill(pid, 9)
        assert process.wait(60) == 5, process.stderr
        assert "the local sandbox service ended with code -9:\n  (it logged nothing)" in process.stderr
        assert str(someone.temporary) not in process.stderr


def _started(process: Marked, module: str) -> list[int]:
    """Pids of the processes that it started with `python -m MODULE`."""
    found = []
    for pid in process.alive():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"-m" in words and words[words.index(b"-m") + 1] == module.encode():
            found.append(pid)
    return found


@pytest.mark.parametrize("imported", ["typer", "redis.client", "deploy.rollouts"])
def test_a_ctrl_c_while_the_command_is_imported_ends_it_silently(imported: str) -> None:
    with user() as someone:
        process = _interrupted_after(imported, someone)
        assert process.wait(60) == 130, process.stderr
        said = [line for line in process.stderr.splitlines() if not line.startswith("import time:")]
    assert said in ([], ["starting Redis, the sandbox service, an orchestrator and two workers (four slots) ..."])


def _interrupted_after(imported: str, someone: User) -> Marked:
    """A demo that is interrupted in the midst of its imports, as soon as Python reports this one."""
    command = [sys.executable, "-X", "importtime", str(COMMAND), "demo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(someone.temporary)}
    output = someone.temporary.parent / "output-imports"
    process = Marked(command, environment=environment, cwd=someone.home, output=output)
    someone.started.append(process)
    wait_until(
        lambda: any(line.split()[-1] == imported for line in process.stderr.splitlines() if line),
        description=f"{imported} is imported",
        seconds=30,
    )
    process.interrupt_group()
    return process


def test_only_budgets_and_the_log_level_are_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(PRODUCTION)
    monkeypatch.setenv("FARM_BUDGETS__COMMAND_SECONDS", "3")
    monkeypatch.setenv("FARM_LOG_LEVEL", "info")
    settings = demo_settings()
    assert (settings.budgets.command_seconds, settings.log_level) == (3, "info")
    assert (settings.queue, settings.limits(), settings.metrics_host) == ("episodes", (20, 0), "127.0.0.1")
