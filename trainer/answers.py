"""What a model's answer says: the tokenizer's own parser, made to take any answer, in training as in evaluation.

What always holds: whatever a model wrote is a call, a wrong call or no call, never the end of a run. Arguments that are
the JSON text of an object, as OpenAI's interface has them, are that object; all others stay as they were written, for
the environment to answer as wrong. JSON nested deeper than Python reads is no call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


def accept_any_answer(tokenizer: Any, *, objects_only: bool = False) -> None:
    """Let `tokenizer.parse_response` take any answer; it is changed in place, and can be given again.

    With `objects_only`, arguments that are no object become one, `{"arguments": ...}`, which no tool takes: OpenEnv's
    adapter would lose a rollout over them instead of letting the session answer.
    TRL's `parse_response` takes a ValueError of it for an answer without calls; a RecursionError would leave TRL.
    """
    parse = getattr(tokenizer, "parse_response", None)
    if parse is not None and not isinstance(parse, _AnyAnswer):
        tokenizer.parse_response = _AnyAnswer(parse, objects_only=objects_only)


class _AnyAnswer:
    """A parser that can be pickled with its tokenizer, into the process of a rollout worker."""

    def __init__(self, parse: Callable[..., Any], *, objects_only: bool) -> None:
        self._parse = parse
        self._objects_only = objects_only

    def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            parsed = self._parse(*args, **options)
            for call in _calls(parsed):
                if "arguments" in call:
                    call["arguments"] = self._read(call["arguments"])
                str(call.get("name")).encode()  # a UnicodeEncodeError is a ValueError: no template renders such a name
        except RecursionError:
            raise ValueError("the answer has JSON that is nested too deeply") from None
        return parsed

    def _read(self, written: Any) -> Any:
        read = arguments_of(written)
        return {"arguments": read} if self._objects_only and not isinstance(read, dict) else read


def _calls(parsed: Any) -> list[dict[str, Any]]:
    """The functions that are called; what has another form is left to TRL, which knows how to refuse it."""
    made = parsed.get("tool_calls") if isinstance(parsed, Mapping) else None
    functions = [call.get("function") for call in made if isinstance(call, dict)] if isinstance(made, list) else []
    return [function for function in functions if isinstance(function, dict)]


def arguments_of(written: Any) -> Any:
    """A call's arguments: the object that a text is the JSON of, else what was written."""
    if not isinstance(written, str):
        return written
    try:
        read = json.loads(written)
    except ValueError:
        return written
    return read if isinstance(read, dict) else written
