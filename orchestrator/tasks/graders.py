"""The graders a task can name, and the shape of expectation that each one needs.

Only names and shapes: the comparison itself is `workers/grading.py`, whose table has the same names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from pydantic import JsonValue

EXPECTED_BYTES = 64 * 1024
"""A candidate's output is cut at 64 KiB: what is longer could never be met."""
INTEGER_BITS = 256
"""Far beyond any honest total; an unbounded integer costs quadratic time to print and to read."""


def _totals_problem(expected: JsonValue) -> str | None:
    if not isinstance(expected, dict) or not expected:
        return 'must be an object of integer totals, such as {"east": 15}'
    for name, total in expected.items():
        if type(total) is not int:
            return f"total {json.dumps(name)} must be an integer"
        if total.bit_length() > INTEGER_BITS:
            return f"total {json.dumps(name)} must be shorter than {INTEGER_BITS} bits"
    return None


def _text_problem(expected: JsonValue) -> str | None:
    return None if isinstance(expected, str) else "must be the exact text of standard output"


def _any_json_problem(_expected: JsonValue) -> str | None:
    return None


def _nothing_problem(expected: JsonValue) -> str | None:
    return None if expected is None else "must be null: this grader asks for exit code 0 and nothing else"


EXPECTATIONS: Mapping[str, Callable[[JsonValue], str | None]] = MappingProxyType(
    {
        "integer_totals": _totals_problem,
        "exact_stdout": _text_problem,
        "json_equal": _any_json_problem,
        "exit_code": _nothing_problem,
    }
)
"""Grader name -> what is wrong with an expectation for it, None when nothing is."""


def grader_names() -> tuple[str, ...]:
    """Every grader a task can name."""
    return tuple(EXPECTATIONS)


def grader_problem(grader: str) -> str | None:
    """Why `grader` cannot be named by a task; None when it can."""
    if grader in EXPECTATIONS:
        return None
    near = get_close_matches(grader, EXPECTATIONS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known graders: {', '.join(EXPECTATIONS)}"
    return f"unknown grader {grader!r}; {hint}"


def expectation_problem(grader: str, expected: JsonValue) -> str | None:
    """Why `grader` could not compare anything with `expected`; None when it can."""
    if problem := grader_problem(grader):
        return problem
    if problem := EXPECTATIONS[grader](expected):
        return problem
    try:
        text = json.dumps(expected, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError:
        return "is nested too deeply"
    except ValueError:  # NaN, infinities, endless integers, lone surrogates
        return "holds a value that JSON text cannot carry"
    return None if len(text) <= EXPECTED_BYTES else f"must be at most {EXPECTED_BYTES} bytes as JSON"
