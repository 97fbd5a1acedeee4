"""Task files: what is read, and which line each mistake is reported at."""

from __future__ import annotations

import json
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.tasks import TaskError, load_builtin, load_tasks
from orchestrator.tasks.positions import MAX_DEPTH, locate

TASK: dict[str, Any] = {
    "id": "one",
    "prompt": "Do it.",
    "files": {},
    "artifact": "a.py",
    "command": "python3 a.py",
    "verification": {},
    "grader": "exit_code",
    "expected": None,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(path: Path, content: str | bytes) -> list[str]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(TaskError) as caught:
        load_tasks(path.name)
    return list(caught.value.problems)


def test_builtin_name_loads_without_a_file(here: Path) -> None:
    assert load_tasks("weekly-sales") == [load_builtin("weekly-sales")]


def test_one_task_a_list_and_lines_give_the_same_tasks(here: Path) -> None:
    both = [TASK, TASK | {"id": "two"}]
    (here / "one.json").write_text(json.dumps(TASK))
    (here / "list.json").write_text(json.dumps(both, indent=1))
    (here / "lines.jsonl").write_text("\r\n".join(map(json.dumps, both)) + "\r\n\r\n")
    (here / "bom.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(TASK).encode())
    assert [task.id for task in load_tasks("list.json")] == ["one", "two"]
    assert load_tasks(here / "lines.jsonl") == load_tasks("list.json")
    assert load_tasks("one.json") == load_tasks("bom.json") == load_tasks("list.json")[:1]


def test_full_and_compact_tasks_share_a_file(here: Path) -> None:
    compact = {"id": "c", "prompt": "p", "input": "x", "expected": {"a": 1}}
    compact["verification"] = {"input": "y", "expected": {"a": 2}}
    (here / "tasks.json").write_text(json.dumps([TASK, compact]))
    assert [task.grader for task in load_tasks("tasks.json")] == ["exit_code", "integer_totals"]


def test_every_mistake_is_reported_at_its_own_line(here: Path) -> None:
    text = """\
[
  {
    "id": "weekly-sales",
    "prompt": "",
    "files": {
      "ok.py": "",
      "../out.py": ""
    },
    "artifact": "a.py",
    "command": "true",
    "verification": {}, "grader": "integer_totals",
    "expected": {
      "east": 1.5
    },
    "budgets": {
      "command_second": 3
    }
  },
  {"id": "weekly-sales",
   "artifact": 3
  },
  7
]
"""
    assert problems(here / "tasks.json", text) == [
        "tasks.json:4: weekly-sales: prompt: must not be empty",
        "tasks.json:7: weekly-sales: files[\"../out.py\"]: must not contain '..'",
        'tasks.json:12: weekly-sales: expected: total "east" must be an integer',
        "tasks.json:16: weekly-sales: budgets.command_second: unknown field; did you mean 'command_seconds'?",
        "tasks.json:19: weekly-sales: prompt: is required",
        "tasks.json:19: weekly-sales: files: is required",
        "tasks.json:19: weekly-sales: command: is required",
        "tasks.json:19: weekly-sales: verification: is required",
        "tasks.json:19: weekly-sales: grader: is required",
        "tasks.json:19: weekly-sales: expected: is required",
        "tasks.json:19: weekly-sales: id: already used in line 3",
        "tasks.json:20: weekly-sales: artifact: must be text",
        "tasks.json:22: task 3: a task must be an object",
    ]


def test_key_given_twice_is_reported_with_both_lines(here: Path) -> None:
    text = json.dumps(TASK | {"files": {"a": "", "b": ""}}, indent=1).replace('"b"', '"a"')
    assert problems(here / "t.json", text) == ["t.json:6: one: files.a: given twice, first in line 5"]


def test_key_given_twice_is_blamed_on_its_own_task_only(here: Path) -> None:
    text = json.dumps([TASK, TASK | {"id": "two", "prompt2": ""}], indent=1).replace("prompt2", "prompt")
    (problem,) = (line for line in problems(here / "t.json", text) if "twice" in line)
    assert problem == "t.json:21: two: prompt: given twice, first in line 14"


def test_syntax_errors_name_line_and_column(here: Path) -> None:
    assert problems(here / "t.json", '{\n "id": "x",\n}') == [
        "t.json:3:1: is not valid JSON: expecting a field name in double quotes"
    ]
    assert problems(here / "t.json", "") == ["t.json:1:1: is not valid JSON: expecting value"]
    assert problems(here / "t.json", "[1,\n 2 3]") == ["t.json:2:4: is not valid JSON: expecting ','"]


def test_every_bad_line_of_a_jsonl_file_is_reported(here: Path) -> None:
    lines = ['{"id": }', json.dumps(TASK), "", json.dumps(TASK), json.dumps([TASK])]
    assert problems(here / "t.jsonl", "\n".join(lines)) == [
        "t.jsonl:1:8: is not valid JSON: expecting value",
        "t.jsonl:4: one: id: already used in line 2",
        "t.jsonl:5: task: a task must be an object",
    ]


@pytest.mark.parametrize("content", ["[]", "[ \n]"])
def test_file_without_a_task_is_an_error(here: Path, content: str) -> None:
    assert problems(here / "t.json", content) == ["t.json:1: holds no task"]


def test_empty_jsonl_file_is_an_error(here: Path) -> None:
    assert problems(here / "t.jsonl", "\n") == ["t.jsonl:1: holds no task"]


def test_bytes_that_are_no_utf_8_are_reported_at_their_line(here: Path) -> None:
    (problem,) = problems(here / "t.json", b'{\n"id": "\xff"}')
    assert problem.startswith("t.json:2: is not UTF-8")


def test_unknown_name_gets_the_nearest_builtin(here: Path) -> None:
    with pytest.raises(TaskError, match="did you mean 'weekly-sales'"):
        load_tasks("weekly-sale")
    with pytest.raises(TaskError, match="built-in tasks: weekly-sales"):
        load_builtin("nothing-like-it")


def test_no_name_at_all_is_shown_as_such(here: Path) -> None:
    with pytest.raises(TaskError, match=r"^'': neither a file nor a built-in task; built-in tasks: weekly-sales"):
        load_tasks("")


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000])
def test_an_integer_that_python_does_not_read_is_told_of_in_our_words(here: Path, number: str) -> None:
    problem = "is not valid JSON: integer of 5000 digits; write a shorter one, or a string"
    assert problems(here / "t.json", f'{{"id": "one",\n "expected": {number}}}') == [f"t.json:2:14: {problem}"]


@pytest.mark.parametrize("name", [".", "a\0b"])
def test_path_that_cannot_be_read_is_a_task_error(here: Path, name: str) -> None:
    with pytest.raises(TaskError, match="cannot be read"):
        load_tasks(name)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=12,
)


@given(json_values, st.sampled_from([None, 0, 2]))
def test_positions_are_those_of_the_values_themselves(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    found = locate(text)
    assert found.value == value
    assert repr(found.value) == repr(value)
    assert not found.repeats
    for place, offset in found.offsets.items():
        inner: Any = value
        for part in place:
            inner = inner[part]
        begins = json.dumps(place[-1]) if place and isinstance(place[-1], str) else json.dumps(inner)[:1]
        assert text.startswith(begins, offset)


@given(st.text('{}[]",:0123456789.eE+-truefalsn\\u \n', max_size=30))
def test_what_is_no_json_is_refused_exactly_when_the_standard_library_refuses(text: str) -> None:
    try:
        expected = json.loads(text)
        json.dumps(expected, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        with pytest.raises(JSONDecodeError):
            locate(text)
    else:
        assert locate(text).value == expected


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        "-Infinity",
        "1e999",
        '"\\ud800"',
        "9" * 5000,
        "[" * 100_000,
        '{"a":' * 100_000,
        '"\n"',
        "01",
        "1 1",
    ],
)
def test_json_that_could_not_be_passed_on_is_refused(text: str) -> None:
    with pytest.raises(JSONDecodeError):
        locate(text)


def test_nesting_is_read_down_to_its_limit() -> None:
    locate("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(JSONDecodeError):
        locate("[" * (MAX_DEPTH + 1) + "1" + "]" * (MAX_DEPTH + 1))
