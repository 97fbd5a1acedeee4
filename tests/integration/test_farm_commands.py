"""`receipts`, `cancel`, `reconcile` and `status` as a person runs them, on real episodes in real sandboxes."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, cast

import pytest

from deploy.exit_codes import ExitCode
from orchestrator.keys import Keys
from orchestrator.leadership import Leadership
from orchestrator.provider import CreateRequest
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import Outcome, Role, allocation_id
from tests.support import warm
from tests.support.bare_farm import intended, leased
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.policies import candidate, repaired, script
from tests.support.processes import worker_environment
from tests.support.redis_server import exact

pytest_plugins = ["tests.support.farm"]


@pytest.fixture(scope="module")
def lasting(ground: Ground) -> Iterator[Field]:
    """A farm that is only read: three real episodes of two runs, and one that still waits."""
    with open_field(ground, own_database=True) as field:
        field.run(field.spec(script(candidate(repaired())), episode_id="e-solved", run_id="run-a", group_id="g-1"))
        field.run(field.spec(script("echo hello"), episode_id="e-wrong", run_id="run-a", group_id="g-2"))
        field.run(field.spec(script(), episode_id="e-setup", run_id="run-b", template="no-such-template"))
        field.farm.ledger.open(field.spec(script(), episode_id="e-open", run_id="run-c"))
        yield field


def run(field: Field, directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command against this farm, from an empty directory."""
    environment = {**worker_environment(field.settings), "NO_COLOR": "1", **variables}
    return warm.farm().run([*warm.FARM_COMMAND, *arguments], env=environment, cwd=directory)


def succeed(field: Field, directory: Path, *arguments: str) -> str:
    """Its standard output."""
    done = run(field, directory, *arguments)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    return done.stdout


@pytest.mark.parametrize("words", [("receipts",), ("receipts", "--format", "jsonl"), ("status",)])
def test_a_full_disk_is_one_line_and_closed_output_none(lasting: Field, tmp_path: Path, words: tuple[str, ...]) -> None:
    def end(output: IO[str]) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli", *words],
            cwd=tmp_path,
            env={**worker_environment(lasting.settings), "NO_COLOR": "1"},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=90,
            check=False,
        )
        return done.returncode, done.stderr

    with Path("/dev/full").open("w") as full:
        text = "error: cannot write the output: No space left on device; make room, or write elsewhere\n"
        assert end(full) == (ExitCode.FAILED, text)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        assert end(closed) == (ExitCode.OUTPUT_CLOSED, "")


def test_every_creation_carries_tag_and_key_and_counters_equal_the_sum_over_receipts(lasting: Field) -> None:
    farm = lasting.farm
    for episode in ("e-solved", "e-wrong"):
        created = [row["metadata"] for row in lasting.events(episode) if row["event"] == "created"]
        assert [row["allocation"] for row in created] == [allocation_id(episode, 1, role) for role in Role]
        assert {row["farm"] for row in created} == {farm.ledger.farm_tag()}
        for role in Role:
            request = farm.ledger.allocations.request(allocation_id(episode, 1, role))
            assert request is not None
            assert request.metadata in created
    found = list(Receipts(farm.redis, farm.ledger.allocations).select(ReceiptFilter()))
    counters = {name: int(count) for name, count in cast("dict[str, str]", farm.redis.hgetall(Keys.COUNTERS)).items()}
    for role in Role:
        rows = [row for settled in found for row in settled.allocations if row.role is role]
        assert counters[f"cost_picousd:{role}"] == sum(row.cost_picousd or 0 for row in rows) > 0
        ran = sum(round(1000 * (row.running_seconds or 0)) for row in rows)
        assert counters[f"sandbox_ms:{role}"] == ran
        assert counters[f"created:{role}"] == sum(1 for row in rows if row.sandbox_id is not None)
    assert {name: n for name, n in counters.items() if name.startswith("episodes:")} == {
        "episodes:solved": 1,
        "episodes:wrong_answer": 1,
        "episodes:setup_failed": 1,
    }
    called = sum(count for name, count in counters.items() if name.startswith("tool_calls:terminal:"))
    assert called == sum(step.name == "terminal" for settled in found for step in settled.receipt.operations) > 0


def test_a_table_shows_the_newest_first_and_says_when_there_are_more(lasting: Field, tmp_path: Path) -> None:
    lines = succeed(lasting, tmp_path, "receipts").splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["e-setup", "e-wrong", "e-solved"]
    assert "setup_failed" in lines[1]
    assert lines[3].split()[4:6] == ["solved", "1.00"]
    limited = succeed(lasting, tmp_path, "receipts", "--limit", "2").splitlines()
    assert limited == lines[:3]
    assert len(succeed(lasting, tmp_path, "receipts", "--since", "1h", "--scored").splitlines()) == 3
    assert len(succeed(lasting, tmp_path, "receipts", "--until", "1h").splitlines()) == 1


def test_json_lines_are_those_that_run_prints(lasting: Field, tmp_path: Path) -> None:
    printed = succeed(lasting, tmp_path, "receipts", "--run", "run-a", "--format", "jsonl").splitlines()
    rows = [json.loads(line) for line in printed]
    assert [row["episode_id"] for row in rows] == ["e-wrong", "e-solved"]
    assert [row["state"] for row in rows[1]["allocations"]] == ["absent", "absent"]
    assert Decimal(rows[1]["cost_usd"]) > 0
    assert succeed(lasting, tmp_path, "receipts", "--run", "run-c", "--format", "jsonl") == "", "open, nothing ended"
    [line] = succeed(lasting, tmp_path, "receipts", "--group", "g-1", "--format", "jsonl").splitlines()
    assert line == printed[1]


def test_an_export_to_a_file_is_whole_or_not_there(lasting: Field, tmp_path: Path) -> None:
    assert succeed(lasting, tmp_path, "receipts", "--output", "all.csv") == ""
    with (tmp_path / "all.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["outcome"] for row in rows] == ["setup_failed", "wrong_answer", "solved"]
    total = sum(Decimal(row["cost_usd"]) for row in rows)
    counted = sum(int(lasting.farm.redis.hget(Keys.COUNTERS, f"cost_picousd:{role}") or 0) for role in Role)
    assert total == Decimal(counted) / 10**12
    assert float(rows[2]["policy_seconds"]) > 0
    assert rows[0]["reward"] == ""
    done = run(lasting, tmp_path, "receipts", "--output", "nowhere/all.csv")
    assert (done.returncode, "nowhere/all.csv" in done.stderr) == (ExitCode.SETTINGS, True)
    (tmp_path / "old.csv").write_text("keep me")
    done = run(lasting, tmp_path, "receipts", "--run", "run-nobody", "--output", "old.csv")
    assert done.returncode == ExitCode.FAILED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.csv", "old.csv"]
    assert (tmp_path / "old.csv").read_text() == "keep me"


def test_one_episode_is_shown_in_full_with_its_transcript(lasting: Field, tmp_path: Path) -> None:
    text = succeed(lasting, tmp_path, "receipts", "e-wrong", "--transcript")
    assert "outcome   wrong_answer, reward 0.0" in text
    assert text.count("sandbox   ") == 2
    assert "--- terminal\necho hello\n--- observation\nhello\n" in text
    assert "echo hello" not in succeed(lasting, tmp_path, "receipts", "e-wrong")
    body = json.loads(succeed(lasting, tmp_path, "receipts", "e-wrong", "--transcript", "--format", "jsonl"))
    assert body["transcript"][0] == {"role": "terminal", "text": "echo hello"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["receipts", "--run", "run-nobody"], ExitCode.FAILED, "no run 'run-nobody'"),
        (["receipts", "e-nobody"], ExitCode.FAILED, "no episode 'e-nobody'"),
        (["receipts", "e-open"], ExitCode.FAILED, "e-open has no receipt yet: it is queued"),
        (["receipts", "e-solved", "--run", "run-a"], ExitCode.SETTINGS, "either an episode or filters"),
        (["receipts", "--transcript"], ExitCode.SETTINGS, "--transcript goes with one episode"),
        (["receipts", "--since", "yesterday"], ExitCode.SETTINGS, "write how long ago"),
        (["receipts", "--outcome", "lucky"], ExitCode.USAGE, "lucky"),
        (["receipts", "--scored", "--aborted"], ExitCode.USAGE, "either --scored or --aborted"),
        (["receipts", "--since", "1h", "--until", "2h"], ExitCode.SETTINGS, "--until 2h is before --since 1h"),
        (["cost", "--since", "1h", "--until", "2h"], ExitCode.SETTINGS, "--until 2h is before --since 1h"),
        (["cost", "--until", f"{'9' * 400}s"], ExitCode.SETTINGS, "write how long ago"),
        (["cancel"], ExitCode.SETTINGS, "say what to cancel"),
        (["cancel", "--episode", "e-open", "--run", "run-c"], ExitCode.SETTINGS, "say what to cancel"),
        (["cancel", "--episode", "e-nobody"], ExitCode.FAILED, "no episode 'e-nobody'"),
        (["cancel", "--run", "run-nobody"], ExitCode.FAILED, "no run 'run-nobody'"),
        (["cancel", "--group", "g-nobody"], ExitCode.FAILED, "nothing is open in group 'g-nobody'"),
    ],
)
def test_what_is_wrong_is_said_clearly(
    lasting: Field, tmp_path: Path, arguments: list[str], code: ExitCode, said: str
) -> None:
    done = run(lasting, tmp_path, *arguments, COLUMNS="200")
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def queued(field: Field, count: int, **changes: Any) -> list[EpisodeSpec]:
    specs = [field.spec(script(), **changes) for _ in range(count)]
    for spec in specs:
        field.farm.ledger.open(spec)
        field.farm.queue.enqueue(spec)
    return specs


@pytest.mark.parametrize("what", [("--run", "run-a"), ("--group", "g-1"), ("--run", "run-a", "--group", "g-1")])
def test_cancelling_what_has_ended_is_no_error(lasting: Field, tmp_path: Path, what: tuple[str, ...]) -> None:
    assert succeed(lasting, tmp_path, "cancel", *what) == "nothing is open: all of it had ended before\n"


def test_cancel_prints_a_summary_and_its_exit_code_says_whether_all_is_over(field: Field, tmp_path: Path) -> None:
    ours = queued(field, 3, group_id="g-1")
    [other] = queued(field, 1)
    shown = succeed(field, tmp_path, "cancel", "--group", "g-1")
    assert shown == "asked 3; ended: cancelled 3\nevery sandbox of them is confirmed absent\n"
    for spec in ours:
        field.check_ended(spec.episode_id, Outcome.CANCELLED, roles=())
    running, lease = leased(field.farm, other)
    body = json.loads(succeed(field, tmp_path, "cancel", "--run", "run-test", "--no-wait", "--json"))
    assert body == {"outcomes": {}, "open": [running.episode_id], "unsettled": []}
    done = run(field, tmp_path, "cancel", "--episode", running.episode_id, "--wait-seconds", "0.1")
    assert done.returncode == ExitCode.FAILED
    assert f"still open: 1; they end at their next boundary ({running.episode_id})" in done.stdout
    assert field.farm.ledger.cancelled(running.episode_id)
    field.farm.redis.zadd(Keys.LEASES, {running.episode_id: 1})
    assert lease.episode_id == running.episode_id


def test_reconcile_by_hand_does_what_its_dry_run_said_and_that_changed_nothing(ground: Ground, tmp_path: Path) -> None:
    with open_field(ground, lease_lost_seconds=1, lease_renew_seconds=0.5) as field:
        tag = field.farm.ledger.farm_tag()
        spec, lease = leased(field.farm, field.spec(script()), lease_seconds=0.1)
        row = intended(field.farm, spec, lease)
        request = CreateRequest(row.allocation_id, "base", 60, False, {"farm": tag, "allocation": row.allocation_id})
        lost = field.provider.create(request)
        field.farm.ledger.allocations.created(row, lost.sandbox_id, lease.token, creating_ms=1)
        orphan = field.provider.create(CreateRequest("orphan-a1-policy", "base", 60, False, {"farm": tag}))
        foreign = field.provider.create(CreateRequest("foreign-a1-policy", "base", 60, False, {"farm": "another"}))
        try:
            before, there = exact(field.farm.redis), field.provider.list({})
            planned = json.loads(succeed(field, tmp_path, "reconcile", "--dry-run"))
            assert [action["action"] for action in planned] == ["finish", "deleteorphan"]
            assert planned[1]["sandbox_id"] == orphan.sandbox_id
            assert exact(field.farm.redis) == before
            assert field.provider.list({}) == there

            rival = Leadership(field.farm.redis, "orchestrator-rival")
            assert rival.take()
            done = run(field, tmp_path, "reconcile")
            assert done.returncode == ExitCode.FAILED
            assert "orchestrator-rival leads" in done.stderr
            assert "reconciler  orchestrator-rival" in succeed(field, tmp_path, "status")
            rival.give_back()

            done = run(field, tmp_path, "reconcile")
            assert json.loads(done.stdout) == {
                "enqueued": [],
                "finished": [spec.episode_id],
                "settled": [row.allocation_id],
                "orphans": [orphan.sandbox_id],
                "forgotten": [],
                "unresolved": {},
            }
            assert [box.sandbox_id for box in field.provider.list({"farm": "another"})] == [foreign.sandbox_id]
            assert field.provider.list({"farm": tag}) == []
            shown = succeed(field, tmp_path, "status")
            assert re.search(r"reconciler  NONE, last round 20[-0-9: ]+; orphans deleted so far: 1", shown)
            assert "nobody leads the reconcilers" in shown
        finally:
            for box in (lost, orphan, foreign):
                field.provider.delete(box.sandbox_id)
