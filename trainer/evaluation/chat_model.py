"""A Transformers model as an evaluation's policy: a chat template with tools, many episodes a batch; needs torch.

What always holds: an episode is one growing list of token ids, as in training; what the model wrote is never rendered
again, and a tool's result is appended as TRL appends it. Weights are read once and change nothing here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.chat_template_utils import get_json_schema
from trl.chat_template_utils import parse_response

from orchestrator.errors import FarmError
from orchestrator.tasks import Task
from trainer.answers import accept_any_answer
from trainer.evaluation.chat_template import ChatTemplate, cannot_load, load_tokenizer
from trainer.evaluation.context import context_of, refuse_long_prompts
from trainer.evaluation.identity import Sampling, Subject, text_digest
from trainer.evaluation.policies import ToolCall
from trainer.evaluation.pretrained import generate_plainly, load_whole
from trainer.evaluation.results import Usage
from trainer.evaluation.seeded_sampling import keep_rows, processors

_FILES = (
    "*.safetensors",
    "*.bin",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",  # sentencepiece's
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
"""What of a checkpoint decides how it answers; optimizer states and logs do not."""

_NO_WEIGHTS = frozenset({"training_args.bin"})
"""Of `_FILES` by name only."""

_TURN_SEEDS = 0x9E3779B97F4A7C15
"""Odd and far from round: the seeds of an episode's turns meet no other episode's."""


@dataclass
class Conversation:
    """One episode as the model sees it."""

    seed: int
    ids: list[int]
    prompt_tokens: int
    turns: int = 0
    completion_tokens: int = 0

    def spent(self) -> int:
        """Tokens after the prompt, observations included."""
        return len(self.ids) - self.prompt_tokens


class ChatModel:
    """Samples tool calls from a model; a `Policy` of the evaluation."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        *,
        tools: Sequence[Callable[..., str]],
        system_prompt: str | None = None,
        batch: int = 16,
    ) -> None:
        model.train(mode=False)
        accept_any_answer(tokenizer)
        self._stops = frozenset(generate_plainly(model, tokenizer))
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._tools: list[Any] = list(tools)
        self._system = system_prompt
        self.batch = batch
        self._template = ChatTemplate(tokenizer)
        self._context = context_of(model.config)

    @property
    def tools_digest(self) -> str:
        """SHA-256 of the tool descriptions that the model is shown."""
        return text_digest(json.dumps([get_json_schema(tool) for tool in self._tools], sort_keys=True))

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise FarmError when a task's prompt leaves no room to answer, before an episode of any has begun."""
        refuse_long_prompts({task.id: len(self._prompt(task)) for task in tasks}, self._context)

    def begin(self, task: Task, seed: int) -> Conversation:
        """The prompt, rendered with the tools; raises FarmError when it leaves no room to answer."""
        ids = self._prompt(task)
        if len(ids) >= self._context:
            raise FarmError(f"{task.id}: the prompt has {len(ids)} tokens and the model takes {self._context}")
        return Conversation(seed, ids, len(ids))

    def respond(self, conversations: Sequence[Conversation]) -> list[list[ToolCall]]:
        """The next turn of each, sampled in batches; longest first, so that a batch pads little."""
        order = sorted(range(len(conversations)), key=lambda row: -len(conversations[row].ids))
        turns: dict[int, list[ToolCall]] = {}
        for begin in range(0, len(order), self.batch):
            rows = order[begin : begin + self.batch]
            for row, ids in zip(rows, self._generate([conversations[row] for row in rows]), strict=True):
                turns[row] = self._take(conversations[row], ids)
        return [turns[row] for row in range(len(conversations))]

    def observe(self, conversation: Conversation, results: Sequence[tuple[str, str]]) -> bool:
        """Append what the tools gave; False when it does not fit or the turns are used up, as in training."""
        suffix = self._template.tool_suffix(results)
        if suffix[0] in self._stops and conversation.ids[-1] == suffix[0]:
            suffix = suffix[1:]  # the model itself began the result, as GLM's does
        fits = conversation.spent() + len(suffix) < self._sampling.max_completion_tokens
        if not fits or len(conversation.ids) + len(suffix) >= self._context:
            return False
        conversation.ids += suffix
        return conversation.turns < self._sampling.max_turns

    def usage(self, conversation: Conversation) -> Usage:
        """Turns and tokens."""
        return Usage(
            turns=conversation.turns,
            prompt_tokens=conversation.prompt_tokens,
            completion_tokens=conversation.completion_tokens,
        )

    def _prompt(self, task: Task) -> list[int]:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        return self._template.prompt([*messages, {"role": "user", "content": task.prompt}], self._tools)

    def _take(self, conversation: Conversation, ids: list[int]) -> list[ToolCall]:
        ids = ids[: self._left(conversation)]
        parsed = parse_response(self._tokenizer, ids, prefix=conversation.ids, tools=self._tools) if ids else {}
        conversation.ids += ids
        conversation.turns += 1
        conversation.completion_tokens += len(ids)
        calls = [call["function"] for call in parsed.get("tool_calls") or [] if call.get("type") == "function"]
        return [ToolCall(call["name"], call["arguments"]) for call in calls]

    def _left(self, conversation: Conversation) -> int:
        budget = self._sampling.max_completion_tokens - conversation.spent()
        return max(1, min(budget, self._context - len(conversation.ids)))

    def _generate(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """The sampled ids of one turn a row, its stop token included.

        A batch goes on until its last row has ended, and no row may go beyond the context: where one is near it, the
        others go on without it.
        """
        seeds = [(it.seed + it.turns * _TURN_SEEDS) % 2**63 for it in conversations]
        draws = processors(self._sampling, seeds)
        said: list[list[int]] = [[] for _ in conversations]
        going = list(range(len(conversations)))
        while going:
            rows = [conversations[place].ids + said[place] for place in going]
            left = [self._left(conversations[place]) - len(said[place]) for place in going]
            most = min(max(left), self._context - max(map(len, rows)))
            answer = self._sampled(rows, most, draws)
            for place, ids in zip(going, answer, strict=True):
                said[place] += ids
            still = [row for row, ids in enumerate(answer) if ids[-1] not in self._stops and len(ids) < left[row]]
            keep_rows(draws, still)
            going = [going[row] for row in still]
        return said

    def _sampled(self, rows: Sequence[list[int]], most: int, draws: LogitsProcessorList) -> list[list[int]]:
        """Up to `most` ids after each row, to its first stop token."""
        width, device = max(map(len, rows)), self._model.device
        padding = self._tokenizer.pad_token_id
        padded = [[padding] * (width - len(ids)) + ids for ids in rows]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in rows]
        config = GenerationConfig(
            do_sample=False,  # the processors sample; nothing else shapes the scores, see `generate_plainly`
            max_new_tokens=most,
            pad_token_id=padding,
            eos_token_id=list(self._stops),
            disable_compile=True,
        )
        with torch.no_grad():
            answer = self._model.generate(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=config,
                logits_processor=LogitsProcessorList([_Numbers(), *draws]),
            )
        return [_until_stop(row, self._stops) for row in answer[:, width:].tolist()]


class _Numbers(LogitsProcessor):  # type: ignore[misc, unused-ignore] # transformers is not checked
    """Ends an evaluation whose model gives no numbers: decoding would take token 0 for the likeliest."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The scores [rows, vocabulary] as they are; a token may be impossible, -inf. Raises FarmError."""
        if not bool((scores < torch.inf).all()):
            raise FarmError(
                "the model's scores hold NaN or infinity: its weights are broken, or too large for their precision; "
                "evaluate a checkpoint from before that"
            )
        return scores


def load_chat_model(
    name: str, *, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Subject]:
    """A model that can call tools, its tokenizer, and what identifies it.

    Raises SettingsError when there is no such model, or when its chat template or parser does not know tool calls.
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(name)
    try:
        dtype = "auto" if place != "cpu" else torch.float32
        model = load_whole(AutoModelForCausalLM.from_pretrained, name, dtype=dtype)
        torch.nn.Module.to(model, place)  # transformers wraps its own in a way that types do not survive
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last: a torch without CUDA
        raise cannot_load(name, error) from None
    subject = Subject(
        kind="model",
        name=name,
        fingerprint=_fingerprint(name, model),
        chat_template=text_digest(str(tokenizer.chat_template)),
        dtype=str(model.dtype).removeprefix("torch."),
    )
    return model, tokenizer, subject


def _until_stop(ids: Sequence[int], stops: frozenset[int]) -> list[int]:
    end = next((place + 1 for place, token in enumerate(ids) if token in stops), len(ids))
    return list(ids[:end])


def _fingerprint(name: str, model: PreTrainedModel) -> str:
    directory = Path(name)
    if not directory.is_dir():
        return text_digest(f"{name}@{getattr(model.config, '_commit_hash', None)}")
    digest = hashlib.sha256()
    found = {path for pattern in _FILES for path in directory.glob(pattern) if path.is_file()}
    for path in sorted(path for path in found if path.name not in _NO_WEIGHTS):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
