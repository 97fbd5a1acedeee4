"""What a task may say, and what it never hands to a sandbox."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.errors import FarmError
from orchestrator.tasks import Task, TaskError, parse_task
from orchestrator.tasks.paths import HOME, home_path

BASE: dict[str, Any] = {
    "id": "echo",
    "prompt": "Make it print 1.",
    "files": {"main.py": "print(2)\n"},
    "artifact": "main.py",
    "command": "python3 -B main.py",
    "verification": {"input.txt": "held out\n"},
    "grader": "exact_stdout",
    "expected": "1\n",
}


def problems(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(TaskError) as caught:
        parse_task(BASE | changes)
    return caught.value.problems


def test_paths_are_kept_absolute_under_the_home() -> None:
    task = parse_task(BASE | {"files": {"a//b/./c.py": "1", "//home/user/d.py": "2"}})
    assert task.sandbox_files() == {"/home/user/a/b/c.py": "1", "/home/user/d.py": "2"}
    assert task.verifier_files() == {"/home/user/input.txt": "held out\n"}
    assert task.artifact == "/home/user/main.py"


@pytest.mark.parametrize(
    "path",
    [
        "",
        " ",
        "dir/",
        "../x",
        "a/../b",
        "/etc/passwd",
        "/home/user",
        "/home/user2/x",
        "~/x",
        "a\0b",
        "a\nb",
        ".",
        "x" * 600,
        "é" * 200,
        "/home/user/../user/x",
        "\ud800",
    ],
)
def test_path_outside_the_home_is_refused_wherever_it_stands(path: str) -> None:
    assert problems(files={path: ""})
    assert problems(verification={path: ""})
    assert any(line.startswith("echo: artifact: ") for line in problems(artifact=path))


@given(st.text(max_size=40))
def test_accepted_path_lies_under_the_home_and_is_stable(path: str) -> None:
    try:
        full = home_path(path)
    except ValueError:
        return
    assert full.startswith(f"{HOME}/")
    assert ".." not in full.split("/")
    assert "//" not in full
    assert home_path(full) == full


def test_two_spellings_of_one_file_are_refused() -> None:
    assert problems(files={"a.py": "1", "/home/user/a.py": "2"}) == (
        "echo: files: 'a.py' and '/home/user/a.py' are the same file",
    )


def test_file_that_is_also_a_directory_is_refused() -> None:
    assert "cannot be a file and the directory" in problems(files={"a": "1", "a/b": "2"})[0]
    assert "cannot be a file and the directory" in problems(verification={"main.py/x": "2"})[0]


def test_held_out_file_cannot_replace_the_submitted_artifact() -> None:
    assert problems(verification={"/home/user/main.py": "print(1)"})[0].startswith("echo: verification: must not")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"id": "Weekly"}, "id"),
        ({"id": "a" * 41}, "id"),
        ({"id": "a\n"}, "id"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n"}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"command": ""}, "command"),
        ({"command": "echo \0"}, "command"),
        ({"command": "x" * (96 * 1024 + 1)}, "command"),
        ({"files": {"a": "é" * (32 * 1024 + 1)}}, "files.a"),
        ({"files": {"a": "\ud800"}}, "files.a"),
        ({"files": {f"f{n}": "" for n in range(65)}}, "files"),
        ({"files": ["a"]}, "files"),
        ({"envs": {"A=B": "x"}}, 'envs["A=B"]'),
        ({"envs": {"A": "\0"}}, "envs.A"),
        ({"envs": {"LANG": "C", "SHELLOPTS": "errexit"}}, "envs.SHELLOPTS"),
        ({"envs": {"BASHOPTS": "nullglob"}}, "envs.BASHOPTS"),
        ({"envs": {"POSIXLY_CORRECT": "1"}}, "envs.POSIXLY_CORRECT"),
        ({"envs": {"FARM_COMMAND": "true"}}, "envs.FARM_COMMAND"),
        ({"envs": {"_farm_out": "x"}}, "envs._farm_out"),
        ({"network": "yes"}, "network"),
        ({"template": ""}, "template"),
        ({"schema_version": 2}, "schema_version"),
        ({"scripts": {"fix": ["true", ""]}}, "scripts.fix[1]"),
        ({"scripts": {"fix": ["true", "echo \ud800"]}}, "scripts.fix[1]"),
        ({"scripts": {"fix": "true"}}, "scripts.fix"),
        ({"budgets": {"command_seconds": 0}}, "budgets.command_seconds"),
        ({"budgets": {"command_seconds": 0.09}}, "budgets.command_seconds"),
        ({"budgets": {"verifier_command_seconds": 1e-9}}, "budgets.verifier_command_seconds"),
        ({"budgets": {"deadline_seconds": 1e-9}}, "budgets.deadline_seconds"),
        ({"budgets": {"policy_window_seconds": 0.99}}, "budgets.policy_window_seconds"),
        ({"budgets": {"command_seconds": True}}, "budgets.command_seconds"),
        ({"budgets": {"command_seconds": 601}}, "budgets.command_seconds"),
        ({"budgets": {"deadline_seconds": float("inf")}}, "budgets.deadline_seconds"),
        ({"budgets": {"deadline_seconds": float("nan")}}, "budgets.deadline_seconds"),
        ({"budgets": {"policy_window_seconds": 60, "deadline_seconds": 60}}, "budgets.deadline_seconds"),
    ],
)
def test_wrong_value_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    assert [line.split(": ")[1] for line in problems(**changes)] == [field]


def test_a_budget_that_no_episode_can_meet_is_told_the_least() -> None:
    budgets = {"deadline_seconds": 1e-9, "command_seconds": 0.01}
    assert list(problems(budgets=budgets)) == [
        "echo: budgets.deadline_seconds: must be at least 1",
        "echo: budgets.command_seconds: must be at least 0.1",
    ]


def test_limits_themselves_are_allowed() -> None:
    task = parse_task(
        BASE | {"files": {"a": "x" * 64 * 1024}, "command": "x" * 96 * 1024, "scripts": {"submit-at-once": []}}
    )
    assert len(task.sandbox_files()["/home/user/a"]) == 64 * 1024
    assert task.scripts == {"submit-at-once": ()}


@pytest.mark.parametrize(
    ("grader", "expected"),
    [
        ("integer_totals", {"east": 1.0}),
        ("integer_totals", {"east": True}),
        ("integer_totals", {}),
        ("integer_totals", [1]),
        ("integer_totals", {"east": 1 << 300}),
        ("exact_stdout", 1),
        pytest.param("exact_stdout", "x" * 70_000, id="long-text"),
        ("json_equal", [float("nan")]),
        pytest.param("json_equal", 10**5000, id="endless-integer"),
        ("json_equal", {"a": "\ud800"}),
        ("exit_code", 1),
    ],
)
def test_expectation_has_the_shape_that_its_grader_needs(grader: str, expected: Any) -> None:
    assert [line.split(": ")[1] for line in problems(grader=grader, expected=expected)] == ["expected"]


def test_visible_expectation_has_the_same_shape_or_is_left_out() -> None:
    assert problems(visible_expected=3)[0].startswith("echo: visible_expected: ")
    assert parse_task(BASE | {"visible_expected": None}).visible_expected is None


def test_unknown_grader_is_named_with_the_nearest_known_one() -> None:
    assert problems(grader="integer_total") == (
        "echo: grader: unknown grader 'integer_total'; did you mean 'integer_totals'?",
    )
    assert "known graders: integer_totals, " in problems(grader="magic")[0]


def test_all_mistakes_are_told_at_once_with_hints() -> None:
    raw = {key: value for key, value in BASE.items() if key != "prompt"}
    raw |= {"promt": "x", "id": "", "budgets": {"comand_seconds": 1}}
    with pytest.raises(TaskError) as caught:
        parse_task(raw)
    assert isinstance(caught.value, FarmError)
    assert sorted(caught.value.problems) == [
        "task: budgets.comand_seconds: unknown field; did you mean 'command_seconds'?",
        "task: id: must be 1 to 40 of a-z, 0-9 and '-'",
        "task: prompt: is required",
        "task: promt: unknown field; did you mean 'prompt'?",
    ]


@pytest.mark.parametrize("raw", [None, [], "weekly-sales", 3])
def test_data_that_is_no_object_is_no_task(raw: object) -> None:
    with pytest.raises(TaskError, match="must be an object"):
        parse_task(raw)


def test_endlessly_nested_expectation_is_a_task_error() -> None:
    nested: Any = []
    for _ in range(10_000):
        nested = [nested]
    assert problems(grader="json_equal", expected=nested)


def test_task_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        parse_task(BASE).prompt = "other"


def test_changing_handed_out_files_changes_no_task() -> None:
    task = parse_task(BASE)
    task.sandbox_files().clear()
    task.verifier_files().clear()
    assert task.sandbox_files()
    assert task.verifier_files()


def test_task_survives_the_journey_through_a_job() -> None:
    task = parse_task(BASE | {"scripts": {"fix": ["true"]}, "budgets": {"command_seconds": 3}})
    again = parse_task(json.loads(task.model_dump_json()))
    assert again == task
    assert again.digest() == task.digest()


def test_digest_names_the_content_and_nothing_else() -> None:
    plain = parse_task(BASE).digest()
    spelled_out = {"network": True, "envs": {}, "files": {"/home/user/main.py": "print(2)\n"}}
    assert parse_task(dict(reversed((BASE | spelled_out).items()))).digest() == plain
    changes: list[dict[str, Any]] = [
        {"prompt": "x"},
        {"expected": "2\n"},
        {"verification": {}},
        {"network": False},
    ]
    for change in changes:
        assert parse_task(BASE | change).digest() != plain
    one, real = (parse_task(BASE | {"grader": "json_equal", "expected": value}).digest() for value in (1, 1.0))
    assert one != real


def test_digest_does_not_depend_on_the_order_of_files() -> None:
    files = {"a": "1", "b": "2"}
    one = parse_task(BASE | {"files": files}).digest()
    assert parse_task(BASE | {"files": dict(reversed(files.items()))}).digest() == one


def test_digest_stays_the_same_across_releases() -> None:
    assert parse_task(BASE).digest() == "f6b46894931d392be1382f887ac1ea0b3c95280bc0c3e6ab6ef1e709b23515dd"


def secrets(mark: str) -> st.SearchStrategy[str]:
    return st.text("0123456789", min_size=6, max_size=12).map(lambda digits: f"{mark}-{digits}")


plain_text = st.text(st.characters(codec="utf-8", exclude_characters="§\0"), max_size=60)
names = st.text("abcdef", min_size=1, max_size=6)


@given(
    files=st.dictionaries(names, plain_text, max_size=4),
    held_out=st.dictionaries(names, secrets("§held"), min_size=1, max_size=4),
    expected=st.recursive(
        secrets("§want"),
        lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(secrets("§want"), inner, min_size=1),
        max_leaves=5,
    ),
    script=st.lists(secrets("§step"), min_size=1, max_size=3),
    visible=secrets("§seen"),
)
def test_nothing_held_out_is_in_what_a_sandbox_gets(
    files: dict[str, str], held_out: dict[str, str], expected: Any, script: list[str], visible: str
) -> None:
    task = Task.model_validate(
        BASE
        | {"files": files, "verification": held_out, "grader": "json_equal", "expected": expected}
        | {"visible_expected": visible, "scripts": {"fix": script}}
    )
    assert "§" not in repr(task.sandbox_files())
    assert len(task.sandbox_files()) == len(files)
    to_verifier = repr(task.verifier_files())
    assert "§held" in to_verifier
    assert all(mark not in to_verifier for mark in ("§want", "§step", "§seen"))
    assert "§" not in repr(task)
