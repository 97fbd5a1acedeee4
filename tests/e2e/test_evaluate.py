"""`rollout-farm evaluate` and `compare` as a user runs them: on nothing, interrupted, and with what cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.exit_codes import ExitCode
from tests.e2e.commands import User, user
from tests.learning.policy import TinyPolicy, tiny_policy, warm_start
from tests.learning.tasks import BUGS, task
from tests.support import warm
from tests.support.waiting import wait_until

LIMITS = ("--max-completion-tokens", "64", "--max-turns", "5", "--episodes", "3")


@pytest.fixture
def someone() -> Iterator[User]:
    with user() as made:
        tasks = [task(bug).model_dump(mode="json") for bug in BUGS]
        (made.home / "tasks.json").write_text(json.dumps(tasks))
        yield made


def save(policy: TinyPolicy, directory: Path) -> None:
    policy.model.save_pretrained(directory)
    policy.tokenizer.save_pretrained(directory)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models: one that knows the form of an episode, one that knows nothing."""
    directory = tmp_path_factory.mktemp("models")
    policy = tiny_policy(0)
    save(policy, directory / "untaught")
    warm_start(policy, seed=0)
    save(policy, directory / "taught")
    return directory


@pytest.fixture
def models(someone: User, saved: Path) -> User:
    """A user with both models at hand."""
    shutil.copytree(saved, someone.home, dirs_exist_ok=True)
    return someone


def evaluated(someone: User, *arguments: str, template: warm.Template | None = None) -> dict[str, Any]:
    command = ("evaluate", "tasks.json", *arguments)
    found, process = someone.run(*command, seconds=110, template=template, HF_HUB_OFFLINE="1")
    assert found == ExitCode.OK, process.stderr
    body: dict[str, Any] = json.loads(process.stdout)
    return body


def refused(someone: User, *arguments: str) -> str:
    """What the command says when it ends with an error, in one line of red and no traceback."""
    code, process = someone.run(*arguments, template=warm.farm(), HF_HUB_OFFLINE="1")
    assert code not in (ExitCode.OK, ExitCode.USAGE), process.stderr
    assert "Traceback" not in process.stderr
    assert process.stdout == ""
    return " ".join(process.stderr.split())


@pytest.mark.timeout(300)  # two processes that import torch
def test_two_models_are_evaluated_and_compared(models: User) -> None:
    first = evaluated(models, "--model", "untaught", "--output", "first", *LIMITS)
    second = evaluated(models, "--model", "taught", "--output", "second", *LIMITS, template=warm.trainer())
    assert json.loads((models.home / "first" / "report.json").read_text()) == first
    assert (first["scored"], second["scored"], first["missing"]) == (6, 6, 0)
    assert set(second["pass_at"]) == {"1", "2", "3"}
    assert second["latency"]["generation"]["count"] == 6
    assert float(second["cost"]["total_usd"]) > 0
    code, process = models.run("compare", "first", "second")
    assert code == ExitCode.OK, process.stderr
    found = json.loads(process.stdout)
    assert found["difference"]["value"] == pytest.approx(second["score"]["value"] - first["score"]["value"])
    assert [row["task_id"] for row in found["by_task"]] == ["off-by-one-high", "off-by-one-low"]
    results = models.home / "second" / "results.jsonl"
    results.write_text(results.read_text().replace('"seed": 0', '"seed": 7', 1))
    assert "seed: 0 and 7" in refused(models, "compare", "first", "second")


def test_a_script_needs_no_model_and_a_finished_evaluation_no_farm(someone: User) -> None:
    report = evaluated(someone, "--script", "right", "--output", "out", "--episodes", "1")
    assert report["score"]["value"] == 1.0
    again, process = someone.run(
        "evaluate", "tasks.json", "--script", "right", "--output", "out", "--episodes", "1",
        template=warm.farm(), REDIS_URL="redis://127.0.0.1:1/0",
    )  # fmt: skip
    assert again == ExitCode.OK
    assert json.loads(process.stdout) == report
    assert "2 results are there, 0 episodes left" in process.stderr
    assert "another evaluation: episodes: 1 and 2" in refused(
        someone, "evaluate", "tasks.json", "--script", "right", "--output", "out", "--episodes", "2"
    )


def test_ctrl_c_leaves_nothing_and_the_same_command_goes_on(someone: User) -> None:
    arguments = ("--script", "right", "--output", "out", "--episodes", "8")
    process = someone.start("evaluate", "tasks.json", *arguments)
    results = someone.home / "out" / "results.jsonl"
    wait_until(
        lambda: results.exists() and len(results.read_text().splitlines()) >= 3,
        description="two results are kept",
        seconds=60,
    )
    process.interrupt_group()
    assert process.wait(60) == ExitCode.INTERRUPTED
    assert "the same command goes on from here" in process.stderr
    kept = results.read_text()
    report = evaluated(someone, *arguments, template=warm.farm())
    assert (report["scored"], report["missing"], report["failures"]["count"]) == (16, 0, 0)
    assert results.read_text().startswith(kept)


def test_what_cannot_be_evaluated_is_said_with_what_to_do(someone: User) -> None:
    run = ("evaluate", "tasks.json", "--output", "out")
    assert "either --model or --script" in refused(someone, *run)
    assert "either --model or --script" in refused(someone, *run, "--model", "taught", "--script", "right")
    assert "it has: right, wrong, both" in refused(someone, *run, "--script", "nothing")
    assert "give the directory of a Transformers checkpoint" in refused(someone, *run, "--model", "nowhere")
    assert "is named twice" in refused(someone, "evaluate", "tasks.json", "tasks.json", *run[2:], "--script", "right")
    assert not (someone.home / "out").exists()


def test_a_prompt_that_is_too_long_is_said_before_anything_runs(models: User) -> None:
    tasks = [task(BUGS[0]).model_dump(mode="json"), task(BUGS[1]).model_dump(mode="json") | {"prompt": "fix " * 300}]
    (models.home / "tasks.json").write_text(json.dumps(tasks))
    said = refused(models, "evaluate", "tasks.json", "--output", "out", "--model", "taught")
    assert f"{tasks[1]['id']} has 302; leave these tasks out" in said
    assert not (models.home / "out").exists()


def test_what_cannot_be_compared_is_said_with_what_to_do(someone: User) -> None:
    assert "rollout-farm evaluate" in refused(someone, "compare", "nothing", "nowhere")
