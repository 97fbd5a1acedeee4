"""What an evaluation asks of a policy, and the policy that needs no model: a script that the task carries.

What always holds: a policy is asked from one thread; what it does in an episode depends on the task, the seed and the
observations of that episode alone, not on which others are asked with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from orchestrator.tasks import Task, TaskError
from trainer.evaluation.identity import Subject, text_digest
from trainer.evaluation.results import Usage

C = TypeVar("C")


@dataclass(frozen=True)
class ToolCall:
    """A policy's wish; whether there is such a tool is the environment's to say."""

    name: str
    arguments: Any
    """As they were written: a mapping when the call is right."""


class Policy(Protocol[C]):
    """Decides tool calls; C is what it keeps of one episode."""

    @property
    def batch(self) -> int:
        """How many episodes it answers at once, at least 1; it is asked for no more."""
        ...

    def begin(self, task: Task, seed: int) -> C:
        """The beginning of an episode."""
        ...

    def respond(self, conversations: Sequence[C]) -> list[list[ToolCall]]:
        """The next turn of each; no call ends that episode."""
        ...

    def observe(self, conversation: C, results: Sequence[tuple[str, str]]) -> bool:
        """Take the (tool, text) results of the last turn's calls; whether there is budget for another turn."""
        ...

    def usage(self, conversation: C) -> Usage:
        """What the episode has spent so far."""
        ...


@dataclass
class _Progress:
    commands: tuple[str, ...]
    done: int = 0


class ScriptPolicy:
    """Runs the commands of the task's script of that name, one a turn, and submits."""

    batch = 1024  # answers cost nothing

    def __init__(self, name: str) -> None:
        self.name = name
        self.subject = Subject(kind="script", name=name, fingerprint=text_digest(name))

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise TaskError when a task has no such script."""
        for task in tasks:
            if self.name not in task.scripts:
                has = ", ".join(task.scripts) or "none"
                raise TaskError([f'{task.id}: no script {self.name!r}; it has: {has}. Add one under "scripts"'])

    def begin(self, task: Task, seed: int) -> _Progress:
        """The beginning of an episode."""
        return _Progress(task.scripts[self.name])

    def respond(self, conversations: Sequence[_Progress]) -> list[list[ToolCall]]:
        """The next command of each, or the submission."""
        turns = []
        for progress in conversations:
            left = progress.commands[progress.done :]
            turns.append([ToolCall("terminal", {"command": left[0]}) if left else ToolCall("submit", {})])
            progress.done += 1
        return turns

    def observe(self, conversation: _Progress, results: Sequence[tuple[str, str]]) -> bool:
        """A script looks at nothing."""
        return True

    def usage(self, conversation: _Progress) -> Usage:
        """Turns only."""
        return Usage(turns=conversation.done)
