"""What a session's policy may call, and what it got wrong about a call.

What always holds: a name or arguments of whatever type are answered, never raised.
"""

from __future__ import annotations

from openenv.core.env_server.mcp_types import Tool  # type: ignore[import-untyped]

TOOLS = (
    Tool(
        name="terminal",
        description="Run a shell command in the sandbox and return what it printed. Files persist, each call is a "
        "fresh shell.",
        input_schema={
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    ),
    Tool(
        name="submit",
        description="Submit the work for judgement; nothing can be changed afterwards.",
        input_schema={"type": "object", "properties": {}, "required": []},
    ),
)
"""What a policy may call."""


def wrong_call(name: object, arguments: object) -> str | None:
    """What the policy got wrong about a call, or None when it can be carried out."""
    wanted = {"terminal": {"command"}, "submit": set()}.get(name) if isinstance(name, str) else None
    if wanted is None:
        return f"There is no tool {shortened(name)}. Use terminal(command=...) or submit()."
    if not isinstance(arguments, dict):
        return f"{name} takes its arguments as an object, got {shortened(arguments)}. Nothing was run."
    if set(arguments) != wanted or not all(isinstance(value, str) for value in arguments.values()):
        takes = "exactly one argument, command, a string" if wanted else "no argument"
        return f"{name} takes {takes}. Nothing was run."
    return None


def shortened(value: object) -> str:
    """What the value looks like, in at most 80 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."
