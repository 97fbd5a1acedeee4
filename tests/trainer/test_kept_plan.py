"""What a resumed run takes from the plan that its directory keeps, and what it is refused."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.command_line import build
from orchestrator.errors import SettingsError
from orchestrator.tasks import Task
from tests.support.policies import weekly_sales
from tests.trainer.test_saved_states import save, save_state
from trainer.kept_plan import KeptPlan, Options, identities, keep_plan, kept_plan, lasting_names
from trainer.training import TrainingPlan, checkpoint_of

TASKS = [weekly_sales(id="first"), weekly_sales(id="second")]
OPTIONS = Options(
    max_steps=9,
    completions=4,
    batch_size=8,
    max_completion_length=64,
    learning_rate=1e-3,
    on_abort="exclude",
    save_steps=2,
    seed=7,
)


def kept(*names: str) -> KeptPlan:
    return KeptPlan(options=OPTIONS, processes=1, tasks=identities(TASKS), task_names=lasting_names(names))


def write(path: Path, tasks: list[Task]) -> None:
    path.write_text("".join(task.model_dump_json() + "\n" for task in tasks))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run over two tasks that saved step 2. Its next --resume stops at a bad line of numbers."""
    save(tmp_path / "model", "fix")
    save_state(tmp_path / "out", 2)
    write(tmp_path / "tasks.jsonl", TASKS)
    (tmp_path / "out" / "metrics.jsonl").write_text("bad\n")
    keep_plan(tmp_path / "out", kept(str(tmp_path / "tasks.jsonl")))
    return tmp_path / "out"


@pytest.fixture
def resume(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CliRunner]:
    """What the command changes of its process is as it was."""
    monkeypatch.chdir(run)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    root, ends = logging.getLogger(), (signal.SIGTERM, signal.SIGHUP)
    level, log_handlers, handlers = root.level, root.handlers[:], [signal.getsignal(it) for it in ends]
    yield CliRunner()
    root.setLevel(level)
    root.handlers[:] = log_handlers
    for it, handler in zip(ends, handlers, strict=True):
        signal.signal(it, handler)


def refused(runner: CliRunner, run: Path, *words: str) -> str:
    arguments = ["train", "--model", str(run.parent / "model"), "--cpu", "--resume", "--output-dir", str(run), *words]
    error = runner.invoke(build(), arguments).exception
    assert isinstance(error, SettingsError), error
    return str(error)


# the command


def test_what_is_not_given_to_a_resumed_run_is_as_it_was(resume: CliRunner, run: Path) -> None:
    assert "metrics.jsonl:1: is no line" in refused(resume, run), "tasks, completions, seed and steps are its own"
    assert "metrics.jsonl:1: is no line" in refused(resume, run, "--max-steps", "20", "--batch-size", "4")
    assert "larger --max-steps" in refused(resume, run, "--max-steps", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "weekly-sales"], r"not the tasks of this run \(1 tasks, and it has 2\)"),
        (["--seed", "42"], "--seed 42: this run has 7"),
        (["--completions", "2"], "--completions 2: this run has 4"),
    ],
)
def test_what_cannot_change_in_a_run_is_refused(resume: CliRunner, run: Path, words: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        raise SettingsError(refused(resume, run, *words))


def test_a_file_of_tasks_that_was_changed_is_not_trained_on(resume: CliRunner, run: Path) -> None:
    write(run.parent / "tasks.jsonl", [TASKS[0], weekly_sales(id="second", prompt="another")])
    assert "second has been changed" in refused(resume, run)
    write(run.parent / "tasks.jsonl", TASKS[::-1])
    assert "task 1 is second and was first" in refused(resume, run)


def test_a_run_that_was_told_no_names_asks_for_them(resume: CliRunner, run: Path) -> None:
    keep_plan(run, kept())
    assert "give them with --tasks" in refused(resume, run)
    assert "metrics.jsonl:1" in refused(resume, run, "--tasks", str(run.parent / "tasks.jsonl"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}'])
def test_a_damaged_plan_is_named(resume: CliRunner, run: Path, text: str) -> None:
    (run / "plan.json").write_text(text)
    assert "plan.json: is no run's plan" in refused(resume, run)


# the plan


def test_another_plan_from_python_is_refused_too(run: Path) -> None:
    plan = TrainingPlan(str(run.parent / "model"), TASKS, output_dir=run, resume=True, **OPTIONS.model_dump())
    with pytest.raises(SettingsError, match=r"metrics\.jsonl:1"):
        checkpoint_of(plan)
    for other in (replace(plan, tasks=TASKS[:1]), replace(plan, seed=1), replace(plan, completions=2)):
        with pytest.raises(SettingsError, match="another --output-dir"):
            checkpoint_of(other)


def test_each_change_is_a_line(tmp_path: Path) -> None:
    was = kept("weekly-sales")
    assert was.changes(OPTIONS, 1) == []
    changed = was.changes(OPTIONS.model_copy(update={"max_steps": 10, "learning_rate": 0.5}), 1)
    assert changed == ["going on with --max-steps 10, it was 9", "going on with --learning-rate 0.5, it was 0.001"]
    smaller = was.changes(OPTIONS.model_copy(update={"batch_size": 4}), 1)
    assert smaller[0] == "going on with --batch-size 4, it was 8"
    assert "counted in steps of the new size" in smaller[1]
    shared = was.changes(OPTIONS.model_copy(update={"batch_size": 4}), 2)
    assert shared[1:] == ["going on with 2 processes, it was 1"], "a step is as large as it was"


def test_a_plan_is_read_as_it_was_kept_and_holds_nothing_of_the_tasks(tmp_path: Path) -> None:
    assert kept_plan(tmp_path / "none") is None
    keep_plan(tmp_path, kept("weekly-sales", "tasks.jsonl"))
    assert kept_plan(tmp_path) == kept("weekly-sales", "tasks.jsonl")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["task_names"] == ["weekly-sales", str(Path("tasks.jsonl").absolute())]
    assert written["tasks"] == [[task.id, task.digest()] for task in TASKS]


def test_what_could_not_be_read_back_is_refused_before_it_is_written() -> None:
    given = {"max_steps": 1, "completions": 2, "batch_size": 2, "max_completion_length": 9, "on_abort": "raise"}
    with pytest.raises(SettingsError, match=r"learning_rate.*finite"):
        Options.of({**given, "save_steps": 1, "seed": 0, "learning_rate": float("inf")})
