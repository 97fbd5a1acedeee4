"""What a session is asked for and what may be read of it: reset arguments and state, in upstream's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from openenv.core.env_server.types import State  # type: ignore[import-untyped]
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from orchestrator.errors import CreateRejected
from orchestrator.provider import CreateRequest
from orchestrator.settings import Budgets

_ALLOCATION = TypeAdapter(CreateRequest)


class ShellResult(BaseModel):
    """Outcome of one shell command, in upstream's form."""

    command: str
    output: str = ""
    error: str | None = None
    success: bool = True


class TerminusState(State):  # type: ignore[misc]
    """What a session holder may read of the session, in upstream's form."""

    sandbox_id: str | None = None
    setup_results: list[ShellResult] = Field(default_factory=list)
    verify_commands: list[str] = Field(default_factory=list)
    verify_results: list[ShellResult] = Field(default_factory=list)
    commands: list[ShellResult] = Field(default_factory=list)
    submitted_answer: str | None = None
    last_reward: float | None = None
    last_error: str | None = None


@dataclass(frozen=True)
class SessionDefaults:
    """What a reset without an `allocation` of the farm creates."""

    template: str = "base"
    lifetime_seconds: int = 600
    allow_internet_access: bool = True
    """As the farm's tasks and OpenEnv's own server have it: setup commands install things."""
    metadata: Mapping[str, str] = field(default_factory=dict)


def create_request(allocation: Any, defaults: SessionDefaults) -> CreateRequest:
    """The farm's `allocation` as it is, or for a plain client one of our own making; CreateRejected if it is wrong."""
    if allocation is None:
        return CreateRequest(
            allocation_id=f"terminus-{uuid4().hex}",
            template=defaults.template,
            lifetime_seconds=defaults.lifetime_seconds,
            allow_internet_access=defaults.allow_internet_access,
            metadata=defaults.metadata,
        )
    try:
        return _ALLOCATION.validate_python(allocation)
    except ValidationError as error:
        raise CreateRejected(f"allocation: {error.error_count()} fields are wrong or missing") from error


def session_budgets(given: Any, own: Budgets) -> Budgets:
    """The episode's budgets as the farm's reset names them, else the server's; CreateRejected if they are wrong."""
    if given is None:
        return own
    try:
        return Budgets.model_validate(given)
    except ValidationError as error:
        raise CreateRejected(f"budgets: {error.error_count()} fields are wrong") from error


def session_commands(reset: Mapping[str, Any], name: str) -> list[str]:
    """The commands of reset's `setup` or `verify` (or `<name>_scripts`): none, one, or a list; blank ones are left out.

    CreateRejected for anything else: nothing is created for a reset that cannot be carried out.
    """
    name = name if name in reset else f"{name}_scripts"
    given = reset.get(name)
    commands = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(commands, list | tuple):
        raise CreateRejected(f"{name}: must be a command or a list of commands, got {type(given).__name__}")
    for number, command in enumerate(commands, 1):
        if not isinstance(command, str):
            raise CreateRejected(f"{name}: command {number} must be a string, got {type(command).__name__}")
    return [command for command in commands if command.strip()]
