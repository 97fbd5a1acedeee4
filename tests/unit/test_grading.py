"""Grading: what counts as right, as wrong and as failed, whatever a candidate printed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import tasks
from orchestrator.provider import CommandResult
from orchestrator.tasks import TaskError
from orchestrator.vocabulary import Outcome
from workers.grading import Grade, grade

TOTALS: dict[str, Any] = {"east": 15, "west": 7}
EXPECTED: dict[str, Any] = {
    "integer_totals": TOTALS,
    "exact_stdout": "east 15\n",
    "json_equal": {"east": [15, 1.5, True, None, "x"]},
    "exit_code": None,
}
RIGHT = {name: (value if isinstance(value, str) else json.dumps(value)).encode() for name, value in EXPECTED.items()}


def run(stdout: bytes = b"", **changes: Any) -> CommandResult:
    fields: dict[str, Any] = {"exit_code": 0, "stderr": b"", "timed_out": False}
    return CommandResult(stdout=stdout, **fields | changes)


def outcome(grader: str, stdout: bytes, expected: Any = None) -> Outcome:
    return grade(grader, EXPECTED[grader] if expected is None else expected, run(stdout)).outcome


def test_every_grader_that_a_task_can_name_is_tried_here() -> None:
    assert set(EXPECTED) == set(tasks.grader_names())


@pytest.mark.parametrize("grader", sorted(EXPECTED))
def test_right_output_is_solved_with_reward_one(grader: str) -> None:
    result = grade(grader, EXPECTED[grader], run(RIGHT[grader], stderr=b"\xff a warning"))
    assert (result.outcome, result.outcome.score) == (Outcome.SOLVED, 1.0)


@pytest.mark.parametrize("grader", sorted(EXPECTED))
@pytest.mark.parametrize(
    "failure",
    [{"exit_code": 1}, {"exit_code": -9}, {"exit_code": None}, {"timed_out": True}],
)
def test_failed_run_is_no_solution_even_with_the_right_output(grader: str, failure: dict[str, Any]) -> None:
    result = grade(grader, EXPECTED[grader], run(RIGHT[grader], **failure))
    assert (result.outcome, result.outcome.score) == (Outcome.CANDIDATE_FAILED, 0.0)


@pytest.mark.parametrize("grader", sorted(EXPECTED))
def test_only_output_that_is_judged_may_not_be_cut(grader: str) -> None:
    """Warnings without end, and a verbose test runner judged by its exit code, are no reason for a zero."""
    judged = grade(grader, EXPECTED[grader], run(RIGHT[grader], stdout_cut=True)).outcome
    assert judged is (Outcome.SOLVED if grader == "exit_code" else Outcome.CANDIDATE_FAILED)
    assert grade(grader, EXPECTED[grader], run(RIGHT[grader], stderr_cut=True)).outcome is Outcome.SOLVED


@pytest.mark.parametrize("stdout", [b' {"west":7,\n"east":15}\r\n', b'{"\\u0065ast": 15, "west": 7}'])
def test_totals_may_be_spelled_as_json_allows(stdout: bytes) -> None:
    assert outcome("integer_totals", stdout) is Outcome.SOLVED


@pytest.mark.parametrize(
    "stdout",
    [b'{"east": 5, "west": 7}', b'{"east": 15}', b'{"east": 15, "west": 7, "x": 0}', b"{}", b'{"x": -1}'],
)
def test_totals_that_differ_are_a_wrong_answer(stdout: bytes) -> None:
    assert outcome("integer_totals", stdout) is Outcome.WRONG_ANSWER


@pytest.mark.parametrize(
    "stdout",
    [
        b"",
        b"done",
        b"null",
        b"[15, 7]",
        b'{"east": 15.0, "west": 7}',
        b'{"east": 1.5e1, "west": 7}',
        b'{"east": true, "west": 7}',
        b'{"east": "15", "west": 7}',
        b'{"east": null, "west": 7}',
        b'{"east": {}, "west": 7}',
        b'{"east": 5, "east": 15, "west": 7}',
        b'{"east": NaN, "west": 7}',
        b'{"east": Infinity, "west": 7}',
        b'{"east": 15, "west": 7} ok',
        b'{"east": 15, "west": 7}\n{"east": 15, "west": 7}',
        b'{"east": 15, "west": 7}\0',
        b'{"east": 15, "west": 7\xff}',
        b'\xef\xbb\xbf{"east": 15, "west": 7}',
        b'{"east": 15, "west": 07}',
        b"{'east': 15, 'west': 7}",
        pytest.param(b'{"east": ' + b"9" * 100_000 + b', "west": 7}', id="endless-integer"),
        b'{"east": 15, "west": 1e999}',
        pytest.param(b"[" * 100_000, id="deep-list"),
        pytest.param(b'{"a":' * 100_000, id="deep-object"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="deep-and-closed"),
    ],
)
def test_output_without_the_form_of_totals_has_failed(stdout: bytes) -> None:
    result = grade("integer_totals", TOTALS, run(stdout))
    assert result.outcome is Outcome.CANDIDATE_FAILED
    assert result.detail.startswith("invalid output: ")


def test_one_total_is_not_true() -> None:
    assert outcome("integer_totals", b'{"a": true}', {"a": 1}) is Outcome.CANDIDATE_FAILED
    assert outcome("integer_totals", b'{"a": 1}', {"a": 1}) is Outcome.SOLVED


@pytest.mark.parametrize("stdout", [b"east 15", b"east 15\r\n", b"East 15\n", b"east 15\n\n", b""])
def test_exact_text_forgives_nothing(stdout: bytes) -> None:
    assert outcome("exact_stdout", stdout) is Outcome.WRONG_ANSWER


def test_exact_text_must_be_utf_8() -> None:
    assert outcome("exact_stdout", b"east 15\n\xff") is Outcome.CANDIDATE_FAILED


@pytest.mark.parametrize(
    ("expected", "stdout"),
    [
        (1, b"1.0"),
        (1.0, b"1"),
        (1, b"true"),
        (0, b"false"),
        ([1], b"[1, 1]"),
        ([1, 2], b"[2, 1]"),
        ({"a": 1}, b'{"a": 1.0}'),
        ({"a": 1}, b'{"b": 1}'),
        ([True], b"[1]"),
        ("1", b"1"),
        ({"a": None}, b"{}"),
    ],
)
def test_json_of_another_type_or_value_is_a_wrong_answer(expected: Any, stdout: bytes) -> None:
    assert outcome("json_equal", stdout, expected) is Outcome.WRONG_ANSWER


@pytest.mark.parametrize(
    "stdout",
    [
        b"",
        b"NaN",
        b"1e999",
        b'{"a": 1, "a": 1}',
        b"1 2",
        b"\xff",
        pytest.param(b"[" * 100_000, id="deep-list"),
        pytest.param(b"9" * 100_000, id="endless-integer"),
    ],
)
def test_output_that_is_no_json_has_failed(stdout: bytes) -> None:
    assert outcome("json_equal", stdout) is Outcome.CANDIDATE_FAILED


def test_null_can_be_the_right_json() -> None:
    assert grade("json_equal", None, run(b"null\n")).outcome is Outcome.SOLVED
    assert grade("json_equal", None, run(b"0")).outcome is Outcome.WRONG_ANSWER


def test_exit_code_alone_decides_when_the_task_says_so() -> None:
    assert grade("exit_code", None, run(b"\xff\x00 anything")).outcome is Outcome.SOLVED
    assert "without an exit code" in grade("exit_code", None, run(exit_code=None)).detail
    assert grade("exit_code", None, run(exit_code=2)).detail == "the command ended with exit code 2"


@pytest.mark.parametrize(("grader", "expected"), [("magic", 1), ("integer_totals", {"a": 1.0}), ("exact_stdout", 3)])
def test_task_that_cannot_be_graded_raises_and_scores_nothing(grader: str, expected: Any) -> None:
    with pytest.raises(TaskError):
        grade(grader, expected, run(b"1"))


def test_verdict_does_not_tell_the_expectation() -> None:
    result = grade("integer_totals", {"secretregion": 424242}, run(b'{"a": 1}'))
    assert "secretregion" not in result.detail
    assert "424242" not in result.detail


@given(
    st.sampled_from(sorted(EXPECTED)),
    st.binary(max_size=200) | st.text('{}[]",:0123456789.eE-truefalsn\\u ', max_size=40).map(str.encode),
    st.none() | st.integers(-300, 300),
    st.booleans(),
    st.booleans(),
)
def test_any_output_gets_a_grade_within_bounds(
    grader: str, stdout: bytes, exit_code: int | None, timed_out: bool, stdout_cut: bool
) -> None:
    result = grade(
        grader,
        EXPECTED[grader],
        run(stdout, exit_code=exit_code, timed_out=timed_out, stdout_cut=stdout_cut),
    )
    assert isinstance(result, Grade)
    assert result.outcome.score in (0.0, 1.0)
    assert (result.outcome.score == 1.0) == (result.outcome is Outcome.SOLVED)
    assert result.outcome in (Outcome.SOLVED, Outcome.WRONG_ANSWER, Outcome.CANDIDATE_FAILED)
    assert len(result.detail) < 200


@given(st.recursive(st.integers() | st.text() | st.booleans() | st.none(), st.lists, max_leaves=8))
def test_json_is_equal_to_itself(value: Any) -> None:
    assert grade("json_equal", value, run(json.dumps(value).encode())).outcome is Outcome.SOLVED
