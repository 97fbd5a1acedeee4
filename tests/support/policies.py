"""What policies do to the weekly-sales task: the report, right or wrong, and the commands that put it in place."""

from __future__ import annotations

import shlex
from typing import Any

from orchestrator.records import Script
from orchestrator.tasks import Task, load_builtin

REPORT = "/home/user/report.py"


def write_file(path: str, text: str) -> str:
    """The shell command that writes `text` to `path`."""
    return f"printf %s {shlex.quote(text)} > {shlex.quote(path)}"


def candidate(source: str) -> str:
    """The shell command by which a policy puts its own report.py in place."""
    return write_file(REPORT, source)


def script(*commands: str, submit: bool = True) -> Script:
    """A policy of these commands."""
    return Script(commands=commands, submit=submit)


def weekly_sales(**changes: Any) -> Task:
    """The built-in task, changed."""
    return load_builtin("weekly-sales").model_copy(update=changes)


def repaired() -> str:
    """The source of a right report.py."""
    wrong = load_builtin("weekly-sales").files[REPORT]
    return wrong.replace('= int(row["amount"])', '= totals.get(row["region"], 0) + int(row["amount"])')
