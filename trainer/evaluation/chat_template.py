"""From messages to token ids, as TRL's trainer does it: the prompt once, then each turn's tool results after it.

What always holds: what was rendered stays as it was; a template that would render it otherwise once more is known is
replaced by TRL's training form of it, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)

from orchestrator.errors import FarmError, SettingsError
from trainer.evaluation.call_reading import refuse_misread_calls


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer, ready to render and to parse tool calls.

    Raises SettingsError when there is none, or when its chat template or parser does not know tool calls.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", truncation_side="left")
    except (OSError, ValueError, KeyError) as error:
        raise cannot_load(name, error) from None
    if not supports_tool_calling(tokenizer):
        raise SettingsError(
            f"--model {name}: its chat template cannot show tool calls and their results; choose a model made for "
            "tool calling, such as Qwen3, or give its tokenizer such a chat_template"
        )
    if getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None:
        try:
            add_response_schema(tokenizer)
        except ValueError:
            raise SettingsError(
                f"--model {name}: nothing here can read tool calls from its answers; choose a model whose chat "
                "template TRL knows, or save a response_template with its tokenizer"
            ) from None
    refuse_misread_calls(tokenizer, f"--model {name}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return cast("PreTrainedTokenizerBase", tokenizer)


def cannot_load(name: str, error: Exception) -> SettingsError:
    """What to say of a model that cannot be read."""
    return SettingsError(
        f"--model {name}: cannot be loaded ({str(error).splitlines()[0]}); give the directory of a Transformers "
        "checkpoint with its tokenizer, or a model id that can be downloaded"
    )


class ChatTemplate:
    """A tokenizer's chat template in the form that can be continued turn by turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._text: str | None = None
        if not is_chat_template_prefix_preserving(tokenizer):
            try:
                self._text = str(get_training_chat_template(tokenizer))
            except ValueError as error:
                raise FarmError(f"this model's chat template cannot be continued turn by turn: {error}") from None

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[Callable[..., str]]) -> list[int]:
        """The messages with the tools' descriptions, up to where the model answers."""
        return self._render(messages, answer=True, tools=tools)

    def tool_suffix(self, results: Sequence[tuple[str, str]]) -> list[int]:
        """What (tool, text) results and the next turn's header add to a conversation that called a tool.

        What the template renders after the last stop token, mostly a newline, is never sampled and comes with it.
        """
        call = {"type": "function", "function": {"name": results[0][0], "arguments": {}}}
        called: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        told = [{"role": "tool", "name": name, "content": text} for name, text in results]
        before = self._render(called, answer=False)
        if (stop := self._tokenizer.eos_token_id) in before:
            before = before[: len(before) - before[::-1].index(stop)]
        after = self._render(called + told, answer=True)
        if after[: len(before)] != before:
            raise FarmError("this chat template renders a call differently once its result is known; use another model")
        return after[len(before) :]

    def turn_ends(self) -> list[str]:
        """The tokens with which the template ends an answer and, where it is another, a turn of calls.

        Empty for a template that ends its turns with ordinary text. Raises FarmError where no call can be rendered.
        """
        mark = "value-a8f3e2b1"
        call = {"type": "function", "function": {"name": "terminal", "arguments": {"command": mark}}}
        answered = self._after(mark, {"role": "assistant", "content": mark})
        called = self._after(mark, {"role": "assistant", "content": "", "tool_calls": [call]})
        tokens = self._tokenizer.added_tokens_decoder.values()
        added = {token.content for token in tokens} | set(self._tokenizer.all_special_tokens)
        ends = sorted((it for it in added if it in answered), key=lambda it: (answered.find(it), -len(it)))[:1]
        if not any(end in called for end in ends):
            special = {token.content for token in tokens if token.special}
            ends += sorted((it for it in special if it in called), key=lambda it: (called.rfind(it), len(it)))[-1:]
        return ends

    def _after(self, mark: str, said: dict[str, Any]) -> str:
        """What is rendered after the mark in what the model said."""
        messages = [{"role": "user", "content": "?"}, said]
        try:
            text = self._tokenizer.apply_chat_template(messages, chat_template=self._text, tokenize=False)
        except TypeError as error:  # as of DeepSeek-V3's: it takes arguments for text, and TRL gives it an object
            raise FarmError(f"this chat template cannot render a tool call ({error}); use another model") from None
        return str(text).rpartition(mark)[2]

    def _render(
        self, messages: Sequence[dict[str, Any]], *, answer: bool, tools: Sequence[Callable[..., str]] | None = None
    ) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            chat_template=self._text,
            add_generation_prompt=answer,
            tokenize=True,
            return_dict=False,
        )
        return cast("list[int]", ids)
