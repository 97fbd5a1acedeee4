"""The ids that options take: whatever no farm could have made is refused before anything is asked or written."""

from __future__ import annotations

import typer

_SHOWN = 80


def checked_id(context: typer.Context, parameter: typer.CallbackParam, value: str | None) -> str | None:
    """A typer callback for the id of a run or a group: the pattern is the one that every id of the farm has."""
    from pydantic import TypeAdapter, ValidationError

    from orchestrator.records import Id

    if value is None or context.resilient_parsing:
        return value
    try:
        return TypeAdapter(Id).validate_python(value)
    except ValidationError:
        given = repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}... ({len(value)} characters)"
        text = f"the id of a {parameter.name} is 1 to 64 of a-z, 0-9 and '-', got {given}"
        raise typer.BadParameter(text) from None
