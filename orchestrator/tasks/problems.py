"""From raw data to a Task, or to every reason why not, each with the place it is about.

Pure: no files, no lines. `loading.py` turns places into lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.tasks.compact import CompactTask, HeldOut, is_compact
from orchestrator.tasks.positions import Place
from orchestrator.tasks.schema import Task, TaskBudgets

_FIELDS: dict[type[BaseModel], dict[Place, type[BaseModel]]] = {
    Task: {(): Task, ("budgets",): TaskBudgets},
    CompactTask: {(): CompactTask, ("verification",): HeldOut},
}
"""Which model's fields are known at which place, for 'did you mean'."""

_WORDS = {
    "missing": "is required",
    "string_type": "must be text",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "tuple_type": "must be a list",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "finite_number": "must be finite",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
}


@dataclass(frozen=True)
class Problem:
    """One thing to correct, and where."""

    place: Place
    text: str


def read_task(raw: object) -> Task | list[Problem]:
    """The task that `raw` describes in either form, or all that is wrong with it."""
    if not isinstance(raw, Mapping):
        return [Problem((), "a task must be an object")]
    form = CompactTask if is_compact(raw) else Task
    try:
        read = form.model_validate(dict(raw))
    except ValidationError as error:
        return [_problem(form, details) for details in error.errors(include_url=False)]
    return read.task() if isinstance(read, CompactTask) else read


def title(raw: object, otherwise: str) -> str:
    """What to call a task that may be wrong: its id where it has one."""
    name = raw.get("id") if isinstance(raw, Mapping) else None
    return name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= 64 else otherwise


def spell(place: Place) -> str:
    """A place as people write it: `budgets.command_seconds`, `files["report.py"]`, `scripts.repair[2]`."""
    spelled = ""
    for part in place:
        if isinstance(part, int):
            spelled += f"[{part}]"
        elif part.replace("-", "_").isidentifier():
            spelled += f".{part}" if spelled else part
        else:
            spelled += f'["{part}"]' if part.isprintable() else f"[{part!a}]"
    return spelled


def _problem(form: type[BaseModel], details: ErrorDetails) -> Problem:
    place = tuple(part for part in details["loc"] if part != "[key]")
    kind, context = details["type"], details.get("ctx", {})
    if kind == "value_error":
        return Problem(place, str(context["error"]))
    if kind == "extra_forbidden":
        return Problem(place, f"unknown field{_near(form, place)}")
    return Problem(place, _WORDS[kind].format(**context) if kind in _WORDS else details["msg"])


def _near(form: type[BaseModel], place: Place) -> str:
    known = _FIELDS[form].get(place[:-1])
    near = get_close_matches(str(place[-1]), known.model_fields, n=1) if known else []
    return f"; did you mean {near[0]!r}?" if near else ""
