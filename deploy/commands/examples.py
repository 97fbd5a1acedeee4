"""The examples that end every command's help."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """An epilog for typer: blank lines keep rich from joining the lines."""
    return "Examples:\n\n" + "\n\n".join(f"$ {line}" for line in lines)
