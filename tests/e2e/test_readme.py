"""The README tells the truth: its code runs, its commands exist, its names and numbers are the code's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from deploy.command_line import build
from deploy.commands.sandboxes_faults import nested
from deploy.exit_codes import ExitCode
from deploy.local_farm import LocalFarm
from orchestrator.settings import Budgets, Settings, load_settings
from orchestrator.tasks import builtin_names, grader_names, parse_task
from orchestrator.vocabulary import Outcome
from tests.support.processes import ROOT
from tests.support.prometheus import rules
from workers.e2b_local.faults import Faults

README = (ROOT / "README.md").read_text()
BLOCKS = [
    (match["language"], match["body"])
    for match in re.finditer(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", README, re.S | re.M)
]
BRIDGE, BATCH, TRAINING, OPENENV, SESSIONS = (body for language, body in BLOCKS if language == "python")


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table rows below a heading, without the table's own head."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "- | -" not in line][1:]


def _commands() -> list[list[str]]:
    """Every `rollout-farm ...` that the text or a shell block names, as words."""
    shell = "\n".join(body for language, body in BLOCKS if language == "sh")
    inline = " \n".join(re.findall(r"`(rollout-farm [^`]+)`", README))
    found = re.findall(r"^rollout-farm +(.+?)(?: >.*| #.*)?$", f"{shell}\n{inline}", re.M)
    return [line.split() for line in dict.fromkeys(found)]


def _run(code: str, directory: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in [name for name in environment if name == "REDIS_URL" or name.startswith(("FARM_", "E2B_"))]:
        del environment[name]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def farm_directory() -> Iterator[Path]:
    """A directory in which a farm of two workers runs, as `rollout-farm up` leaves it."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="readme-") as name:
        directory = Path(name)
        try:
            with LocalFarm(load_settings(state_dir=directory / ".farm"), workers=2):
                yield directory
        finally:
            os.environ.clear()
            os.environ.update(before)


def test_the_bridge_runs_as_it_stands_and_earns_one(farm_directory: Path) -> None:
    printed = _run(BRIDGE, farm_directory).splitlines()
    assert printed[-1] == "1.0"
    assert '{"east": 5, "west": 7}' in printed


def test_the_batch_runs_in_an_open_pool(farm_directory: Path) -> None:
    imports, opening = BRIDGE.partition("settings = ")[::2]
    head = imports + "settings = " + opening.partition("with pool.submit")[0]
    body = "".join(f"    {line}\n" for line in BATCH.splitlines())
    _run(f"{head}\n{body}    print(len(episodes))", farm_directory)


@pytest.mark.timeout(300)  # two processes that import torch
def test_the_training_runs_on_a_model_made_here(farm_directory: Path, tmp_path: Path) -> None:
    make = "from pathlib import Path\nfrom tests.support.tiny_policy import SUBMIT, save_model\n"
    _run(f"{make}save_model(Path({str(tmp_path)!r}), [SUBMIT], prompt='fix')", farm_directory)
    head = BRIDGE.partition("with Pool(")[0]
    code = TRAINING.replace("Qwen/Qwen3-0.6B", str(tmp_path)).replace('"none")', '"none", use_cpu=True, bf16=False)')
    assert "train_loss" in _run(f"{head}\n{code}    print(trainer.state.log_history)", farm_directory)


def test_openenv_collects_on_the_farm(farm_directory: Path) -> None:
    assert _run(SESSIONS, farm_directory).splitlines()[-1].startswith("0.0 SessionCounts(open=0, scored=2, failed=0")


def test_the_openenv_client_is_answered_by_the_server_alone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "terminus", "--port", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            where = re.search(r"http://[\d.:]+", server.stdout.readline())
            assert where is not None
            printed = _run(OPENENV.replace("http://127.0.0.1:8010", where.group()), tmp_path)
        finally:
            server.terminate()
            server.wait(30)
    assert printed.splitlines()[0] == "hello"
    assert "Verification: 1/1 passed; reward=1.0" in printed


def test_every_command_exists_with_its_options() -> None:
    root = typer.main.get_command(build())
    assert _commands()
    for words in _commands():
        command, rest = root, list(words)
        while rest and rest[0] in (known := getattr(command, "commands", {})):
            command, rest = known[rest[0]], rest[1:]
        assert command is not root, f"no command {words[0]!r}"
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in rest if word.startswith("--")} <= options | {"--help"}, words


def test_every_help_answers() -> None:
    for name in sorted({words[0] for words in _commands()}):
        assert CliRunner().invoke(build(), [name, "--help"]).exit_code == 0, name


def test_every_fault_is_there_and_told_of() -> None:
    told = {
        name.split(".")[0] for row in _rows("Let the local service fail") for name in re.findall(r"`(.+?)`", row[0])
    }
    assert told == set(Faults.model_fields)
    for words in _commands():
        if words[:3] == ["sandboxes", "faults", "set"]:
            assert Faults.model_validate(nested(words[3:])).shown()


def test_every_variable_is_a_setting() -> None:
    known = {f"FARM_{name}".upper() for name in Settings.model_fields}
    known |= {f"FARM_BUDGETS__{name}".upper() for name in Budgets.model_fields}
    named = set(re.findall(r"\bFARM_[A-Z0-9_]*[A-Z0-9]\b", README))
    assert named <= known


def test_every_budget_is_listed_with_its_default() -> None:
    listed = {row[0].strip("`"): float(row[1]) for row in _rows("Budgets")}
    assert listed == {f"FARM_BUDGETS__{name}".upper(): float(value) for name, value in Budgets().model_dump().items()}


def test_the_outcomes_and_their_rewards_are_the_vocabulary() -> None:
    listed = {row[0].strip("`"): None if row[1] == "none" else float(row[1]) for row in _rows("Outcomes")}
    assert listed == {str(outcome): outcome.score for outcome in Outcome}


def test_the_plans_are_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row[0].strip("`"): (int(row[1]), float(row[2].partition(":")[0])) for row in _rows("The E2B cloud")}
    assert rows.pop("unset") == load_settings().limits()
    assert set(rows) == {"hobby", "pro"}
    for plan, limits in rows.items():
        monkeypatch.setenv("FARM_PLAN", plan)
        assert load_settings().limits() == limits


def test_the_tasks_are_valid_and_the_graders_complete() -> None:
    tasks = [parse_task(json.loads(body)) for language, body in BLOCKS if language == "json"]
    assert [task.id for task in tasks] == ["double-it", "monthly-sales"]
    assert {row[0].strip("`") for row in _rows("Tasks")} == set(grader_names())
    assert "weekly-sales" in builtin_names()


def test_the_alerts_are_those_of_prometheus() -> None:
    listed = {row[0].strip("`"): row[2] for row in _rows("Prometheus, alerts and Grafana")}
    assert listed == {rule["alert"]: rule["labels"]["severity"] for rule in rules() if "alert" in rule}


def test_the_exit_codes_are_the_commands() -> None:
    listed = re.search(r"^Exit codes: (.+?)\.$", README, re.S | re.M)
    assert listed is not None
    assert [int(code) for code in re.findall(r"\d+", listed.group(1))] == sorted(ExitCode)


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.M)) <= targets


def test_the_first_screen_is_a_sentence_a_diagram_and_two_commands() -> None:
    assert [language for language, _ in BLOCKS[:3]] == ["mermaid", "sh", "text"]
    assert BLOCKS[1][1].split("\n")[:2] == ["make demo", "make test"]


def test_there_are_at_least_twelve_troubles() -> None:
    rows = _rows("Troubleshooting")
    assert len(rows) >= 12
    assert all(len(row) == 3 and all(row) for row in rows)
