"""A policy small enough to learn on a processor in seconds: each word that it can say is one whole tool call.

Made in code, so that nothing is downloaded: a tokenizer of words, a transformer of one layer, and a warm start that
teaches it the form of an episode and not which repair belongs to which bug. Its first reward is about 0.3.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.learning.tasks import BUGS, LOOK, PATCHED, PROMPT, REPAIR, Bug, seen
from tests.support.tool_template import RESPONSE, TEMPLATE
from trainer.evaluation.chat_template import ChatTemplate
from trainer.evaluation.tools import TOOLS

SUBMITTED = "Submitted. The episode is closed."


@dataclass(frozen=True)
class TinyPolicy:
    """A model and its tokenizer."""

    model: GPT2LMHeadModel
    tokenizer: PreTrainedTokenizerFast

    @property
    def silenced(self) -> list[int]:
        """Tokens that are no action: what sampling leaves out."""
        spoken = set(self.model.generation_config.eos_token_id)
        return [token for token in range(len(self.tokenizer)) if token not in spoken]


def _call(name: str, **arguments: str) -> str:
    """A tool call as one word: JSON's \\u0020 stands for the spaces in a command."""
    body = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{body}</tool_call>".replace(" ", "\\u0020")


ACTIONS = {
    "look": _call("terminal", command=LOOK),
    **{f"repair {bug}": _call("terminal", command=REPAIR[bug]) for bug in BUGS},
    "submit": _call("submit"),
}


def tiny_policy(seed: int) -> TinyPolicy:
    """An untaught policy. Keeps torch to one thread: a model of this size only loses time to more."""
    torch.set_num_threads(1)
    observed = [*(seen(bug) for bug in BUGS), PATCHED, *SUBMITTED.split()]
    words = ["<pad>", "<|im_end|>", "<unk>", "<user>", "<act>", "<obs>", *PROMPT.split(), *observed, *ACTIONS.values()]
    raw = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=1,
        n_head=2,
        n_embd=32,
        n_positions=256,
        initializer_range=0.1,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    policy = TinyPolicy(GPT2LMHeadModel(config), tokenizer)
    calls = [tokenizer.convert_tokens_to_ids(word) for word in ACTIONS.values()]
    policy.model.generation_config.eos_token_id = [end, *calls]
    policy.model.generation_config.suppress_tokens = policy.silenced
    return policy


class _Imitation:
    """Random episodes of the right form: look, some repair, submit, with slips; the repair fits with chance `skill`."""

    def __init__(self, policy: TinyPolicy, *, seed: int, legal: float, skill: float) -> None:
        self._random = random.Random(seed)
        self._legal, self._skill = legal, skill
        tokenizer, template = policy.tokenizer, ChatTemplate(policy.tokenizer)
        self._tokens = {name: int(tokenizer.convert_tokens_to_ids(word)) for name, word in ACTIONS.items()}
        self._end = tokenizer.eos_token_id
        self._prompt = template.prompt([{"role": "user", "content": PROMPT}], TOOLS)
        said = [*(seen(bug) for bug in BUGS), PATCHED, SUBMITTED]
        self._observed = {text: template.tool_suffix([("terminal", text)]) for text in said}

    def episode(self, turns: int = 4) -> tuple[list[int], list[int]]:
        """Token ids and labels; observations carry the label -100, which no loss counts."""
        bug = self._random.choice(BUGS)
        ids, labels, stage = list(self._prompt), [-100] * len(self._prompt), 0
        for _ in range(turns):
            name = self._action(stage, bug)
            token = self._end if name is None else self._tokens[name]
            ids, labels = [*ids, token], [*labels, token]
            if name is None:
                break
            stage = max(stage, {"look": 1, "submit": 3}.get(name, 2))
            text = SUBMITTED if stage == 3 else seen(bug) if name == "look" else PATCHED
            ids += self._observed[text]
            labels += [-100] * len(self._observed[text])
        return ids, labels

    def _action(self, stage: int, bug: Bug) -> str | None:
        if self._random.random() >= self._legal:
            return self._random.choice([*self._tokens, None])
        fits = self._random.random() < self._skill
        repaired = bug if fits else next(other for other in BUGS if other != bug)
        return ("look", f"repair {repaired}", "submit", None)[stage]


def warm_start(
    policy: TinyPolicy, *, seed: int, steps: int = 200, batch: int = 64, legal: float = 0.5, skill: float = 0.65
) -> None:
    """Teach the form of an episode: as a pretrained model would, it acts sensibly and is often wrong."""
    imitation = _Imitation(policy, seed=seed, legal=legal, skill=skill)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=5e-3)
    for _ in range(steps):
        ids, labels = zip(*(imitation.episode() for _ in range(batch)), strict=True)
        inputs = torch.tensor(_padded(ids, policy.tokenizer.pad_token_id))
        targets = torch.tensor(_padded(labels, -100))
        mask = (inputs != policy.tokenizer.pad_token_id).long()
        logits = policy.model(input_ids=inputs, attention_mask=mask).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _padded(rows: Sequence[list[int]], value: int) -> list[list[int]]:
    width = max(map(len, rows))
    return [row + [value] * (width - len(row)) for row in rows]
