"""Whether a tokenizer's parser reads the calls that its own chat template writes.

What always holds: a model is taken only when it does, for commands with quotes, commas, brackets, backslashes, lines
and letters of any language; white space around a command may be lost. Otherwise another command than the model's would
be run, scored and trained on. It is the text that is looked at, so the tokenizer's words do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from orchestrator.errors import SettingsError
from trainer.answers import arguments_of
from trainer.evaluation.tools import TOOLS

_TELLING = (
    "ls -la /home",
    "python3 -c 'print(1, (2))'",
    'echo "a, b" > "c d"',
    """printf '%s\\n' "it's", 'x'""",
    "cat > a.py <<'E'\nx = {'a': [1, \"two\"]}\nE",
    "echo été 世界 🙂 <b>&amp;</b>",
)

_ASKED = signature(PreTrainedTokenizerBase.parse_response).parameters

_READS_TEMPLATES = "prefix" in _ASKED
"""Since transformers 5.13. Before, TRL asks with a `response_schema`, which is not looked at here."""

_TYPED: dict[str, Any] = {"tools": list(TOOLS)} if "tools" in _ASKED else {}
"""As TRL asks a parser: the tools' schemas type the arguments since transformers 5.15."""

_SHOWN_CHARACTERS = 160


def refuse_misread_calls(tokenizer: Any, name: str) -> None:
    """Raise SettingsError, about `name`, when a call is read otherwise than it is written.

    A tokenizer without template or parser is left to who needs them.
    """
    if not _READS_TEMPLATES or not getattr(tokenizer, "chat_template", None):
        return
    if getattr(tokenizer, "response_template", None) is None:
        return
    for tool, given in [("submit", {}), *(("terminal", {"command": command}) for command in _TELLING)]:
        if (read := _read_back(tokenizer, tool, given)) != [(tool, given)]:
            written = f"{tool}({', '.join(map(repr, given.values()))})"
            raise SettingsError(
                f"{name}: the parser of its answers does not read what its chat template writes: {written} becomes "
                f"{_shown(read)}, so other commands would run than the model says; choose another model, or save a "
                "response_template that reads them with its tokenizer"
            )


def _read_back(tokenizer: Any, tool: str, given: Mapping[str, str]) -> list[tuple[Any, Any]]:
    """Name and arguments of the calls that are read in a turn that makes this one."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    call = {"type": "function", "function": {"name": tool, "arguments": dict(given)}}
    prompt = _rendered(tokenizer, asked, answer=True)
    whole = _rendered(tokenizer, [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, prompt, strict=False)))
    said = whole[alike:]  # a prompt may begin a thought that is not in `whole`
    try:
        parsed = tokenizer.parse_response(said, prefix=prompt, **_TYPED)
    except ValueError:
        return []  # what TRL takes for an answer without calls
    try:
        functions = [it["function"] for it in parsed.get("tool_calls") or []]
        return [(it["name"], _stripped(arguments_of(it["arguments"]))) for it in functions]
    except (TypeError, KeyError, AttributeError):
        return []  # no call either


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], *, answer: bool = False) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=answer, tokenize=False))
    except (TypeError, TemplateError) as error:  # DeepSeek-V3's takes arguments for text; TRL gives it an object
        raise SettingsError(f"this chat template cannot render a tool call ({error}); use another model") from None


def _stripped(arguments: Any) -> Any:
    if not isinstance(arguments, Mapping):
        return arguments
    return {name: value.strip() if isinstance(value, str) else value for name, value in arguments.items()}


def _shown(read: list[tuple[Any, Any]]) -> str:
    calls = [(name, map(repr, given.values()) if isinstance(given, Mapping) else [repr(given)]) for name, given in read]
    return ", ".join(f"{name}({', '.join(texts)})" for name, texts in calls)[:_SHOWN_CHARACTERS] or "no call"
