"""Grading: what a candidate's run in the verifier is worth, decided on the host.

Pure functions over bytes that a candidate wrote; whatever they are, the answer is a Grade. Only an unusable
task raises, and that is a TaskError. A Grade's detail may be shown to a policy: it tells no expectation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import NoReturn

from pydantic import JsonValue

from orchestrator.provider import CommandResult
from orchestrator.tasks.graders import expectation_problem
from orchestrator.tasks.schema import TaskError
from orchestrator.vocabulary import Outcome

_INTEGER_DIGITS = 4_300
"""Python's own limit, so that no expectation has more; reading longer ones costs quadratic time."""


@dataclass(frozen=True)
class Grade:
    """A verdict, of those that have a score, and why in a few words."""

    outcome: Outcome
    detail: str


class _InvalidOutputError(Exception):
    """The candidate's output does not have the form that its task asks for."""


def grade(grader: str, expected: JsonValue, run: CommandResult) -> Grade:
    """Judge one run by the named grader; raises TaskError when the task itself cannot be graded."""
    if problem := expectation_problem(grader, expected):
        raise TaskError([f"expected: {problem}"])
    if failure := _failure(run, reads_output=grader not in _WITHOUT_OUTPUT):
        return Grade(Outcome.CANDIDATE_FAILED, failure)
    try:
        right = _GRADERS[grader](expected, run.stdout)
    except _InvalidOutputError as error:
        return Grade(Outcome.CANDIDATE_FAILED, f"invalid output: {error}")
    if right:
        return Grade(Outcome.SOLVED, "the output is as expected")
    return Grade(Outcome.WRONG_ANSWER, "the output differs from what was expected")


def _failure(run: CommandResult, *, reads_output: bool) -> str | None:
    """Why nothing is left to judge; what no grader reads (stderr always, stdout at times) may be cut."""
    if run.timed_out:
        return "the command timed out"
    if run.exit_code is None:
        return "the command ended without an exit code"
    if run.exit_code != 0:
        return f"the command ended with exit code {run.exit_code}"
    return "the output is too large" if run.stdout_cut and reads_output else None


def _integer_totals(expected: JsonValue, stdout: bytes) -> bool:
    totals = _json(stdout)
    if not isinstance(totals, dict) or not all(type(total) is int for total in totals.values()):
        raise _InvalidOutputError("not one JSON object of integers")
    return totals == expected


def _json_equal(expected: JsonValue, stdout: bytes) -> bool:
    return _same(expected, _json(stdout))


def _exact_stdout(expected: JsonValue, stdout: bytes) -> bool:
    return _text(stdout) == expected


def _exit_code(_expected: JsonValue, _stdout: bytes) -> bool:
    return True  # _failure has already seen to it that the code is 0


_GRADERS: Mapping[str, Callable[[JsonValue, bytes], bool]] = MappingProxyType(
    {
        "integer_totals": _integer_totals,
        "exact_stdout": _exact_stdout,
        "json_equal": _json_equal,
        "exit_code": _exit_code,
    }
)
"""Grader name -> whether an output is right; raises _InvalidOutputError when it has no valid form."""

_WITHOUT_OUTPUT = frozenset({"exit_code"})
"""The graders that read no output."""


def _same(expected: JsonValue, actual: JsonValue) -> bool:
    """Equality that tells 1, 1.0 and true apart; as deep as the trusted `expected` at most."""
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, dict) and isinstance(actual, dict):
        return expected.keys() == actual.keys() and all(_same(expected[key], actual[key]) for key in expected)
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(_same, expected, actual))
    return expected == actual


def _text(stdout: bytes) -> str:
    try:
        return stdout.decode()
    except UnicodeDecodeError:
        raise _InvalidOutputError("not UTF-8") from None


def _json(stdout: bytes) -> JsonValue:
    """The one JSON value that `stdout` consists of."""
    try:
        value: JsonValue = json.loads(
            _text(stdout),
            object_pairs_hook=_distinct,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_short_integer,
        )
    except json.JSONDecodeError:
        raise _InvalidOutputError("not one JSON value") from None
    except RecursionError:
        raise _InvalidOutputError("nested too deeply") from None
    return value


def _distinct(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _InvalidOutputError("a key is given twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise _InvalidOutputError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if not isfinite(number := float(digits)):
        raise _InvalidOutputError("a number is out of range")
    return number


def _short_integer(digits: str) -> int:
    if len(digits) > _INTEGER_DIGITS:
        raise _InvalidOutputError("an integer is too long")
    return int(digits)
