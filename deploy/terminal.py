"""What the command prints, and how: consoles, one red line for an error, and nothing that a sandbox could steer.

Text that came from a sandbox, a task or another host passes through `safe`: whatever could move the cursor, change the
title, turn text around or break an encoding is shown as its code instead.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from orchestrator.escaping import escape_control


def safe(text: str, *, multiline: bool = True) -> str:
    """`text` with everything that steers a terminal spelled out, such as \\x1b; newlines too unless multiline."""
    shown = escape_control(text)
    return shown if multiline else shown.replace("\n", "\\n").replace("\t", "\\t")


def output() -> Console:
    """The console for results, on standard output; a fresh one so that redirections are seen."""
    return Console(highlight=False, soft_wrap=True)


def errors() -> Console:
    """The console for progress and errors, on standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """The reason a command ends, in red on standard error."""
    errors().print(Text(f"error: {safe(message)}", style="red"))
