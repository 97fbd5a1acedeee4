"""The two tools as a model is shown them. Their docstrings are what it reads; nothing is executed here."""

from __future__ import annotations


def submit() -> str:
    """Submit your work for grading. The episode is closed afterwards."""
    raise NotImplementedError


def terminal(command: str) -> str:
    """Run a shell command in the sandbox and see what it prints. Files stay between commands; each is a fresh shell.

    Args:
        command: The shell command.
    """
    raise NotImplementedError


TOOLS = (submit, terminal)
