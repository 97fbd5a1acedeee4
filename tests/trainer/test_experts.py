"""Nothing of an excluded completion reaches the loss, nor that of the router of a mixture of experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

from orchestrator.errors import EpisodeAborted
from orchestrator.pool import Pool
from orchestrator.vocabulary import Outcome
from tests.support.policies import weekly_sales
from tests.support.timed_pool import TimedEpisode, TimedPool
from tests.support.tiny_policy import SUBMIT, Turn, grpo_config, make_model, make_tokenizer, rows, scripted, shell
from trainer import FarmGRPOTrainer, RemoteEpisodes

LOOK, LOST, LOST_OTHERWISE = shell("ls"), shell("lost"), shell("lost otherwise")


class Losing(TimedEpisode):
    """Aborted when its first command says so."""

    closing_seconds = 1.0

    def reward(self) -> float:
        """A tenth for each action."""
        if self.log and self.log[0].startswith("lost"):
            raise EpisodeAborted(Outcome.SANDBOX_LOST, "lost")
        return super().reward()


class LosingPool(TimedPool):
    """Of such episodes."""

    def submit(self, task: Any, **options: Any) -> TimedEpisode:
        """One that is there at once."""
        self.episodes.append(Losing(f"e-{len(self.episodes)}", self.times, 0.0))
        return self.episodes[-1]


def model_of_experts(tokenizer: Any) -> Any:
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=1,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def trained(directory: Path, lost: str) -> Any:
    """After a step over a group whose last episode says `lost`, and is."""
    set_seed(1)
    tokenizer = make_tokenizer([LOOK, LOST, LOST_OTHERWISE, SUBMIT, "ok1", "ok2", "ok3", "bye"])
    scripts: list[list[Turn]] = [[[LOOK], [SUBMIT], []], [[]], [[LOOK], []], [[lost], [lost], []]]
    trainer = scripted(FarmGRPOTrainer, scripts)(
        model=model_of_experts(tokenizer),
        args=grpo_config(directory, batch=4, max_completion_length=60, optim="sgd", max_grad_norm=1e9),
        train_dataset=rows(weekly_sales()),
        processing_class=tokenizer,
        environment_factory=RemoteEpisodes(cast(Pool, LosingPool()), on_abort="exclude"),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_loss_of_a_group_with_an_excluded_completion_is_a_number(tmp_path: Path, temperature: float) -> None:
    """Also where the same completions are learned from twice, and what a tool said was most unlikely."""
    set_seed(1)
    tokenizer = make_tokenizer([LOOK, LOST, SUBMIT, "ok1", "ok2", "ok3", "bye"])
    model = make_model(tokenizer)
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(60.0)
    trainer = scripted(FarmGRPOTrainer, [[[LOOK], [SUBMIT], []], [[]], [[LOOK], []], [[LOST], []]])(
        model=model,
        args=grpo_config(
            tmp_path,
            batch=4,
            max_completion_length=60,
            optim="sgd",
            learning_rate=1e-7,
            num_iterations=2,
            max_steps=2,
            temperature=temperature,
            logging_nan_inf_filter=False,
        ),
        train_dataset=rows(weekly_sales()),
        processing_class=tokenizer,
        environment_factory=RemoteEpisodes(cast(Pool, LosingPool()), on_abort="exclude"),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses), losses


def test_what_an_excluded_completion_says_changes_no_weight(tmp_path: Path) -> None:
    one, other = trained(tmp_path, LOST), trained(tmp_path, LOST_OTHERWISE)
    for trainer in (one, other):
        first = trainer.state.log_history[0]
        assert first["episodes/excluded"] == 1
        assert first["aux_loss"] > 0
    before = model_of_experts(one._tokenizer).state_dict()
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(one.model.state_dict()[router], before[router]), "the router learned something"
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name]), name
