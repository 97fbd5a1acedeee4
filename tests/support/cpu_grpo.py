"""What AsyncGRPOTrainer lacks on a machine without GPU and vLLM: a sampler, a way for the weights, an attention kernel.

All else is TRL's own: the trainer, the rollout worker with its spawned child, the harness loop, scoring and packing.
Weights travel through a file: the trainer replaces it, the child's policy reads it again when it has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

from tests.support.tool_template import RESPONSE, TEMPLATE
from trainer.async_grpo import FarmRolloutWorker

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "CpuRolloutWorker",
    "NoModelWorker",
    "WeightFile",
    "call_token",
    "tiny_policy",
    "without_gpu",
]

END = "<|im_end|>"


def call_token(name: str, **arguments: str) -> str:
    """A whole tool call as one word."""
    text = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{text}</tool_call>".replace(" ", "\\u0020")


def tiny_policy(calls: Sequence[str], directory: Path, *, seed: int) -> tuple[Any, Any]:
    """(tokenizer, model): a random model of one layer whose every turn is a call or the end; saved there too."""
    words = ["<pad>", END, "<unk>", "<user>", "<act>", "<obs>", *calls]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token=END, unk_token="<unk>")
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(calls))]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer, model


class WeightFile:
    """TRL's WeightTransferProtocol through a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sent = 0

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        """Who samples goes on with the weights that it has."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replace the file."""
        fresh = self._path.with_suffix(".new")
        torch.save({name: tensor.clone() for name, tensor in iterator}, fresh)
        fresh.replace(self._path)
        self.sent += 1

    def resume(self) -> None:
        """See pause."""

    def destroy(self) -> None:
        """Nothing to release."""


class Sampler:
    """One token a turn from the newest weights in the file; lives in the child."""

    def __init__(self, directory: Path, weights: Path, choices: Sequence[int]) -> None:
        torch.set_num_threads(1)
        self._model = Qwen3ForCausalLM.from_pretrained(directory).eval()
        self._weights = weights
        self._choices = torch.tensor(choices)
        self._read = 0
        self._lock = threading.Lock()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def sample(self, prompt_ids: list[int], temperature: float) -> tuple[list[int], list[float]]:
        """(token ids, their log-probabilities under the whole vocabulary)."""
        with self._lock:
            if (changed := self._weights.stat().st_mtime_ns) != self._read:
                self._model.load_state_dict(torch.load(self._weights))
                self._read = changed
            logits = self._model(input_ids=torch.tensor([prompt_ids])).logits[0, -1] / temperature
            logps = torch.log_softmax(logits, -1)
            token = int(self._choices[torch.multinomial(logps[self._choices].exp(), 1)])
            return [token], [float(logps[token])]


class _WithoutHttp(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's loop without the HTTP session that it opens for vLLM."""

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        await asyncio.gather(self._generate_loop(stop_event=stop_event), self._score_loop(stop_event=stop_event))


class CpuHarnessLoop(_HarnessRolloutLoop, _WithoutHttp):  # type: ignore[misc]
    """TRL's harness loop with a sampler of its own in vLLM's place."""

    def __init__(self, *, directory: Path, weights: Path, **loop: Any) -> None:
        super().__init__(**loop)
        self._sampler = Sampler(directory, weights, self.eos_token_ids)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        return await asyncio.get_running_loop().run_in_executor(
            None, self._sampler.sample, prompt_ids, self.temperature
        )


class CpuRolloutWorker(FarmRolloutWorker):
    """The farm's rollout worker: its child is a spawned process, and what it gets is pickled."""

    _loop_cls = CpuHarnessLoop


class NoModelLoop(CpuHarnessLoop):
    """Whose model server refuses every request, as vLLM does what is longer than its max_model_len."""

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        raise RuntimeError("400, message='Bad Request', url='http://localhost:8000/v1/completions'")


class NoModelWorker(CpuRolloutWorker):
    """A rollout worker without a model."""

    _loop_cls = NoModelLoop


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *_: Any, **kw: Any
) -> torch.Tensor:
    """FlashAttention 3's varlen function, slowly: causal from the end of each packed stretch."""
    out = []
    stretches = zip(*(row.tolist() for row in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:])), strict=True)
    for q_from, q_to, k_from, k_to in stretches:
        queries, keys = q_to - q_from, k_to - k_from
        seen = torch.ones(queries, keys).tril(keys - queries).bool()
        heads = torch.nn.functional.scaled_dot_product_attention(
            q[q_from:q_to].transpose(0, 1),
            k[k_from:k_to].transpose(0, 1),
            v[k_from:k_to].transpose(0, 1),
            attn_mask=seen,
            scale=kw.get("softmax_scale"),
        )
        out.append(heads.transpose(0, 1))
    return torch.cat(out)


_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload([__name__])


@contextlib.contextmanager
def without_gpu(*, spawned: bool = False) -> Iterator[None]:
    """Let AsyncGRPOTrainer and its worker be made where there is no CUDA, no vLLM and no kernel to load.

    The child is forked from a process that has imported what it needs; `spawned` as TRL does it.
    """
    context = multiprocessing.get_context("spawn") if spawned else _FORKED
    with (
        patch.object(async_rollout_worker, "mp", SimpleNamespace(get_context=lambda _: context)),
        patch.object(async_rollout_worker, "is_vllm_available", lambda: True),
        patch.object(async_rollout_worker, "is_aiohttp_available", lambda: True),
        patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None),
        patch.object(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=_attention)),
    ):
        yield
