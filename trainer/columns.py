"""What a dataset's row holds for an episode: its task, and whether it has a prompt of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.tasks import Task, TaskError, parse_task


def task_of(column: str | Mapping[str, Any] | None) -> Task:
    """The task that a dataset's `task` column holds; raises TaskError that says how to write it."""
    if isinstance(column, str):
        try:
            column = json.loads(column)
        except (ValueError, RecursionError) as error:  # the latter: nested a thousand levels deep
            raise TaskError([f"task column: is not JSON ({error}); write it with json.dumps(task)"]) from None
    if not isinstance(column, Mapping):
        raise TaskError([f"task column: holds {type(column).__name__}, not a task; write it with json.dumps(task)"])
    return parse_task(dict(column))


def says_something(prompt: Any) -> bool:
    """Whether the row has a prompt; TRL puts one with an empty message where there is none."""
    if isinstance(prompt, str):
        return bool(prompt)
    return bool(prompt) and any(message.get("content") for message in prompt if isinstance(message, Mapping))
