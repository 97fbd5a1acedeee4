"""The compact form and the built-in task: what they print, before and after the repair."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tasks import Task, TaskError, builtin_names, load_builtin, parse_task

COMPACT: dict[str, Any] = {
    "id": "two-regions",
    "prompt": "Repair the report.",
    "input": "region,amount\na,1\na,2\n",
    "expected": {"a": 3},
    "verification": {"input": "region,amount\nb,5\nb,-7\nc,1\n", "expected": {"b": -2, "c": 1}},
}


class Jail:
    """A directory that stands for /home/user."""

    def __init__(self, home: Path, files: Mapping[str, str]) -> None:
        self.home = home
        self.home.mkdir()
        for path, text in files.items():
            self.write(path, text)

    def write(self, path: str, text: str) -> None:
        Path(self._here(path)).write_text(self._here(text))

    def read(self, path: str) -> str:
        return Path(self._here(path)).read_text().replace(str(self.home), "/home/user")

    def run(self, command: str) -> str:
        command = self._here(command).replace("python3", sys.executable)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True)
        return done.stdout

    def _here(self, text: str) -> str:
        return text.replace("/home/user", str(self.home))


def outputs(task: Task, script: str, tmp_path: Path) -> tuple[Any, Any]:
    """What the artifact prints on the visible and on the held-out input after a scripted policy."""
    workspace = Jail(tmp_path / "policy", task.sandbox_files())
    for command in task.scripts[script]:
        workspace.run(command)
    verifier = Jail(tmp_path / "verifier", task.verifier_files())
    verifier.write(task.artifact, workspace.read(task.artifact))
    return json.loads(workspace.run(task.command)), json.loads(verifier.run(task.command))


def test_weekly_sales_is_built_in() -> None:
    assert builtin_names() == ("weekly-sales",)
    assert load_builtin("weekly-sales").id == "weekly-sales"


def test_weekly_sales_shows_the_bug_until_it_is_repaired(tmp_path: Path) -> None:
    task = load_builtin("weekly-sales")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    visible, held_out = outputs(task, "buggy", tmp_path / "a")
    assert visible == {"east": 5, "west": 7}
    assert held_out != task.expected
    visible, held_out = outputs(task, "repair", tmp_path / "b")
    assert visible == {"east": 15, "west": 7} == task.visible_expected
    assert held_out == task.expected


def test_weekly_sales_expects_other_regions_than_it_shows() -> None:
    task = load_builtin("weekly-sales")
    assert isinstance(task.expected, dict)
    assert isinstance(task.visible_expected, dict)
    assert set(task.expected) - set(task.visible_expected)
    assert any(isinstance(total, int) and total < 0 for total in task.expected.values())


def test_compact_task_becomes_a_full_one_with_both_scripts(tmp_path: Path) -> None:
    task = parse_task(COMPACT)
    assert task.prompt == "Repair the report."
    assert set(task.sandbox_files()) == {"/home/user/report.py", "/home/user/sales.csv"}
    assert task.verifier_files() == {"/home/user/sales.csv": "region,amount\nb,5\nb,-7\nc,1\n"}
    assert task.expected == {"b": -2, "c": 1}
    assert task.visible_expected == {"a": 3}
    assert outputs(task, "repair", tmp_path) == ({"a": 3}, {"b": -2, "c": 1})


def test_compact_form_and_its_full_form_are_the_same_task() -> None:
    task = parse_task(COMPACT)
    assert parse_task(task.model_dump(mode="json")) == task


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt": ""}, "two-regions: prompt: must not be empty"),
        ({"input": ""}, "two-regions: input: must not be empty"),
        ({"expected": {"a": 1.5}}, 'two-regions: expected: total "a" must be an integer'),
        (
            {"verification": {"input": "x", "expected": {}}},
            "two-regions: verification.expected: must be an object",
        ),
        ({"verification": {"input": "x"}}, "two-regions: verification.expected: is required"),
        ({"verification": None}, "two-regions: verification: must be an object"),
        ({"inputs": "x"}, "two-regions: inputs: unknown field; did you mean 'input'?"),
    ],
)
def test_mistake_in_the_compact_form_is_told_in_its_own_words(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse_task(COMPACT | changes)
    (line,) = caught.value.problems
    assert line.startswith(problem)


def test_full_task_with_a_held_out_file_named_expected_is_a_full_task() -> None:
    task = parse_task(COMPACT)
    raw = task.model_dump(mode="json") | {"verification": {"expected": "x", "input": "y"}}
    assert parse_task(raw).verifier_files() == {"/home/user/expected": "x", "/home/user/input": "y"}


def test_misspelled_input_is_still_read_as_the_compact_form() -> None:
    raw = {key: value for key, value in COMPACT.items() if key != "input"} | {"inptu": "region,amount\n"}
    with pytest.raises(TaskError) as caught:
        parse_task(raw)
    assert sorted(caught.value.problems) == [
        "two-regions: inptu: unknown field; did you mean 'input'?",
        "two-regions: input: is required",
    ]


def test_the_files_of_a_compact_task_lie_where_its_prompt_says() -> None:
    raw = {
        "id": "elsewhere",
        "prompt": "Repair /home/user/work/report.py. The input is /home/user/work/sales.csv.",
        "input": "region,amount\neast,10\n",
        "expected": {"east": 10},
        "verification": {"input": "region,amount\nwest,3\n", "expected": {"west": 3}},
    }
    task = parse_task(raw)
    assert set(task.files) == {"/home/user/work/report.py", "/home/user/work/sales.csv"}
    assert task.artifact == "/home/user/work/report.py"
    assert set(task.verification) == {"/home/user/work/sales.csv"}
    assert '"/home/user/work/sales.csv"' in task.files[task.artifact]
    assert "/home/user/report.py" not in task.model_dump_json()
