"""What an executor needs of a session on a Terminus server; `workers/terminus/client.py` is the real one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from orchestrator.provider import CreateRequest


class StepResult(Protocol):
    """What a terminal call returned."""

    @property
    def text(self) -> str: ...

    @property
    def exit_code(self) -> int | None: ...

    @property
    def timed_out(self) -> bool: ...

    @property
    def truncated(self) -> bool: ...

    @property
    def binary(self) -> bool: ...


class PolicySession(Protocol):
    """The episode's session on the worker's Terminus server."""

    def prepare(self) -> None:
        """Begin to connect, without waiting."""

    def reset(self, request: CreateRequest) -> str:
        """Make one creation attempt; the sandbox id."""

    def terminal(self, command: str) -> StepResult:
        """Run one command."""

    def close(self) -> None:
        """Give the place back."""


@dataclass(frozen=True)
class NotRun:
    """The answer to a command that no shell can be given; the policy reads it like any observation."""

    text: str
    exit_code: int | None = None
    timed_out: bool = False
    truncated: bool = False
    binary: bool = False
