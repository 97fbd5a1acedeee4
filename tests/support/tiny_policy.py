"""A policy without a model hub: a tokenizer whose every tool call is one word, a GPT2 of one layer, and scripts.

A script replaces sampling alone, so that TRL's own parsing, tool loop, masks, loss and optimizer do the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig
from trl.chat_template_utils import qwen3_chat_template, qwen3_template

from orchestrator.tasks import Task
from trainer.evaluation.tools import TOOLS

torch.set_num_threads(1)

_BASE = ("<pad>", "<|im_end|>", "<unk>", "done", "<tool_call>", "</tool_call>")
_POSITIONS = 1024


def call(name: str, **arguments: Any) -> str:
    """A tool call as the one word that it is to the tokenizer: a space inside is written \\u0020."""
    text = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return text.replace(" ", "\\u0020")


def shell(command: str) -> str:
    """A call of terminal."""
    return call("terminal", command=command)


SUBMIT = call("submit")


def make_tokenizer(words: Sequence[str]) -> Any:
    """Word level, with the template and the response parser that TRL knows as qwen3's."""
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*_BASE, *words]))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.response_template = {**qwen3_template, "start_anchor": "<unk>"}
    return tokenizer


def make_model(tokenizer: Any, *, seed: int = 7) -> Any:
    """One layer, 32 wide."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=1,
        n_head=2,
        n_embd=32,
        n_positions=_POSITIONS,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def grpo_config(directory: Path, *, batch: int, group: int | None = None, **changes: Any) -> Any:
    """One step of one batch on CPU, nothing reported or saved."""
    given: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": batch,
        "num_generations": group or batch,
        "max_steps": 1,
        "max_completion_length": 160,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
    }
    return GRPOConfig(**{**given, **changes})


def rows(*tasks: Task, prompt: str = "fix") -> Any:
    """A dataset with a prompt and the task as JSON text."""
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": prompt}], "task": task.model_dump_json()} for task in tasks]
    )


Turn = Sequence[str]
"""The tool calls of one turn; none ends the completion."""


def script_words(scripts: Sequence[Sequence[Turn]]) -> list[str]:
    """Every tool call in the scripts."""
    return [word for script in scripts for turn in script for word in turn]


def turn_ids(tokenizer: Any, turn: Turn) -> list[int]:
    """A turn as the model would write it."""
    words = [word for made in turn for word in ("<tool_call>", made, "</tool_call>")] or ["done"]
    return [int(tokenizer.convert_tokens_to_ids(word)) for word in [*words, "<|im_end|>"]]


def scripted(base: Any, scripts: Sequence[Sequence[Turn]], **members: Any) -> Any:
    """`base` whose row n of every generation batch says what `scripts[n]` says, its last turn again and again.

    Keeps what a generation returned in `generated`.
    """

    def generate_single_turn(self: Any, prompt_ids: Any, *args: Any, **options: Any) -> Any:
        if self._live is None:
            self._turns = [0] * len(prompt_ids)
        live = range(len(prompt_ids)) if self._live is None else self._live()
        said = []
        for row in live:
            script = scripts[row % len(scripts)]
            said.append(turn_ids(self._tokenizer, script[min(self._turns[row], len(script) - 1)]))
            self._turns[row] += 1
        return said, None

    def tool_call_loop(self: Any, prompts: Any, *args: Any, **options: Any) -> Any:
        lengths = [len(prompt) for prompt in prompts]

        def live() -> list[int]:
            """Rows that TRL goes on with: their prompts have just grown."""
            grown = [row for row, prompt in enumerate(prompts) if len(prompt) != lengths[row]]
            for row in grown:
                lengths[row] = len(prompts[row])
            return grown

        self._live = live
        try:
            return base._tool_call_loop(self, prompts, *args, **options)
        finally:
            self._live = None

    def generate(self: Any, prompts: Any) -> Any:
        self.generated = base._generate(self, prompts)
        return self.generated

    own: Mapping[str, Any] = {
        "_live": None,
        "_generate_single_turn": generate_single_turn,
        "_tool_call_loop": tool_call_loop,
        "_generate": generate,
    }
    return type("Scripted" + base.__name__, (base,), {**own, **members})


def teach(
    model: Any,
    tokenizer: Any,
    said: Turn,
    *,
    prompt: Sequence[Mapping[str, str]],
    tools: Sequence[Callable[..., str]] | None = None,
    steps: int = 80,
) -> None:
    """Let the model begin its answer to this prompt, shown with these tools, with these calls."""
    prefix = tokenizer.apply_chat_template(
        prompt, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    answer = turn_ids(tokenizer, said)
    ids = torch.tensor([[*prefix, *answer]])
    labels = torch.tensor([[-100] * len(prefix) + answer])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save_model(directory: Path, said: Turn, *, prompt: str) -> Path:
    """A checkpoint that a command can load, of a model that begins with these calls."""
    tokenizer = make_tokenizer(said)
    model = make_model(tokenizer)
    teach(model, tokenizer, said, prompt=[{"role": "user", "content": prompt}], tools=TOOLS)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
