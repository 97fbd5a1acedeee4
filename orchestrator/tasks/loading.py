"""Reading tasks: from the package, from files and from plain data, reporting every mistake at once.

A problem is one line, `file:line: task: field: what is wrong`; what is no JSON gives `file:line:column: ...`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from json import JSONDecodeError
from pathlib import Path

from orchestrator.tasks.positions import Document, Place, locate
from orchestrator.tasks.problems import Problem, read_task, spell, title
from orchestrator.tasks.schema import Task, TaskError

SET_BYTES = 64 * 1024 * 1024
"""A set of tasks is held in memory whole, with a position for each value."""

_BUILTIN = files("orchestrator.tasks") / "data"


def builtin_names() -> tuple[str, ...]:
    """The tasks that come with the farm."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _BUILTIN.iterdir()))


def load_builtin(name: str) -> Task:
    """One of the tasks that come with the farm."""
    if name not in builtin_names():
        raise TaskError([_unknown(name)])
    return _read(f"{name}.json", (_BUILTIN / f"{name}.json").read_bytes())[0]


def load_tasks(path_or_name: str | Path) -> list[Task]:
    """The tasks of a built-in name, a .json file (one task or a list) or a .jsonl file (one a line)."""
    name = str(path_or_name)
    if not name:  # as an unset variable gives it; a Path of nothing is the directory
        raise TaskError([_unknown("''")])
    if isinstance(path_or_name, str) and name in builtin_names():
        return [load_builtin(name)]
    path = Path(path_or_name)
    try:
        if path.exists() and not path.is_file():
            raise TaskError([f"{name}: cannot be read: it is not a file"])
        if path.stat().st_size > SET_BYTES:
            raise TaskError([f"{name}: is larger than {SET_BYTES // 1024 // 1024} MiB; split it"])
        content = path.read_bytes()
    except FileNotFoundError:
        raise TaskError([_unknown(name)]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise TaskError([f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}"]) from None
    return _read(name, content)


def parse_task(raw: object) -> Task:
    """The task that plain data describes, in the full or the compact form."""
    task = read_task(raw)
    if isinstance(task, Task):
        return task
    name = title(raw, "task")
    raise TaskError([": ".join(filter(None, (name, spell(it.place), it.text))) for it in task])


def _unknown(name: str) -> str:
    near = get_close_matches(name, builtin_names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"built-in tasks: {', '.join(builtin_names())}"
    return f"{name}: neither a file nor a built-in task; {hint}"


@dataclass(frozen=True)
class _Text:
    """One JSON text of a file, the line it starts in, and what was found in it."""

    first_line: int
    text: str
    document: Document

    def line(self, place: Place) -> int:
        """The line of the nearest thing to `place` that the text has."""
        offsets = self.document.offsets
        while place not in offsets:
            place = place[:-1]
        return self.line_at(offsets[place])

    def line_at(self, offset: int) -> int:
        return self.first_line + self.text.count("\n", 0, offset)


@dataclass(frozen=True)
class _Entry:
    """One task's raw data in its text."""

    source: _Text
    place: Place
    raw: object
    name: str


@dataclass(frozen=True, order=True)
class _Report:
    """One line of a TaskError; reports sort in the file's order."""

    line: int
    text: str
    column: int | None = None


def _read(file: str, content: bytes) -> list[Task]:
    one_a_line = file.endswith(".jsonl")
    reports: list[_Report] = []
    texts = list(_texts(content, reports, one_a_line=one_a_line))
    entries = [entry for text in texts for entry in _entries(text, one_a_line=one_a_line)]
    results = [read_task(entry.raw) for entry in entries]
    first_lines: dict[str, int] = {}
    for entry, result in zip(entries, results, strict=True):
        wrong = result if isinstance(result, list) else []
        reports += [_report(entry, problem) for problem in [*wrong, *_repeated_id(entry, first_lines)]]
        reports += _repeated_keys(entry)
    if not entries and not reports:
        reports.append(_Report(1, "holds no task"))
    if reports:
        raise TaskError([_spell_report(file, report) for report in sorted(reports, key=lambda it: it.line)])
    return [result for result in results if isinstance(result, Task)]


def _report(entry: _Entry, problem: Problem) -> _Report:
    line = entry.source.line((*entry.place, *problem.place))
    return _Report(line, ": ".join(filter(None, (entry.name, spell(problem.place), problem.text))))


def _spell_report(file: str, report: _Report) -> str:
    column = "" if report.column is None else f":{report.column}"
    return f"{file}:{report.line}{column}: {report.text}"


def _texts(content: bytes, reports: list[_Report], *, one_a_line: bool) -> Iterator[_Text]:
    try:
        whole = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        reports.append(_Report(line, f"is not UTF-8: {error.reason}"))
        return
    for number, text in enumerate(whole.split("\n") if one_a_line else [whole], start=1):
        if one_a_line and not text.strip():
            continue
        try:
            yield _Text(number, text, locate(text))
        except JSONDecodeError as error:
            line = number + error.lineno - 1
            reports.append(_Report(line, f"is not valid JSON: {error.msg.lower()}", error.colno))


def _entries(source: _Text, *, one_a_line: bool) -> Iterator[_Entry]:
    value = source.document.value
    if isinstance(value, list) and not one_a_line:
        for index, raw in enumerate(value):
            yield _Entry(source, (index,), raw, title(raw, f"task {index + 1}"))
    else:
        yield _Entry(source, (), value, title(value, "task"))


def _repeated_id(entry: _Entry, first_lines: dict[str, int]) -> list[Problem]:
    name = entry.raw.get("id") if isinstance(entry.raw, dict) else None
    if not isinstance(name, str):
        return []
    if name in first_lines:
        return [Problem(("id",), f"already used in line {first_lines[name]}")]
    first_lines[name] = entry.source.line((*entry.place, "id"))
    return []


def _repeated_keys(entry: _Entry) -> Iterator[_Report]:
    depth = len(entry.place)
    for place, offset in entry.source.document.repeats:
        if place[:depth] == entry.place:
            text = f"{spell(place[depth:])}: given twice, first in line {entry.source.line(place)}"
            yield _Report(entry.source.line_at(offset), f"{entry.name}: {text}")
