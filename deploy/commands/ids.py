"""The ids that options take: whatever no farm could have made is refused before anything is asked or written."""

from __future__ import annotations

import typer

_SHOWN = 80


def checked_id(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """A typer callback for the id of a run or a group: the pattern is the one that every id of the farm has."""
    from orchestrator.records import is_id

    if value is None or context.resilient_parsing or is_id(value):
        return value
    given = repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}... ({len(value)} characters)"
    raise typer.BadParameter(f"the id of a {parameter.name} is 1 to 64 of a-z, 0-9 and '-', got {given}")
