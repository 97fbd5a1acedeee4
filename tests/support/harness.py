"""A scripted model for OpenEnv's harness adapters, and what policies of the tests do with the weekly-sales task."""

from __future__ import annotations

from typing import Any

from openenv.core.harness import ModelStepResult  # type: ignore[import-untyped]
from openenv.core.llm_client import LLMResponse, ToolCall  # type: ignore[import-untyped]

from tests.support.policies import candidate, repaired

Call = tuple[str, dict[str, Any]]

SUBMIT: Call = ("submit", {})
RIGHT: tuple[Call, ...] = (("terminal", {"command": candidate(repaired())}), SUBMIT)


def run(command: str) -> Call:
    """A terminal call."""
    return "terminal", {"command": command}


class ScriptedModel:
    """A `ModelStep` that makes the given calls one a turn, whatever it sees, and then says that it is done."""

    def __init__(self, *calls: Call) -> None:
        self._calls = calls

    def __call__(self, messages: list[dict[str, Any]], tools: list[Any], sampling: dict[str, Any]) -> Any:
        turn = sum(message["role"] == "assistant" for message in messages)
        called = [ToolCall(id=f"call-{turn}", name=name, args=args) for name, args in self._calls[turn : turn + 1]]
        return ModelStepResult(LLMResponse(content="" if called else "done", tool_calls=called))
