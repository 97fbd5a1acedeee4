"""A run that no longer computes with numbers ends, says so, and leaves what was good."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.training_report import NoBars
from orchestrator.errors import FarmError, SettingsError
from tests.support.farm import Field
from tests.support.policies import weekly_sales
from tests.support.tiny_policy import (
    SUBMIT,
    Turn,
    make_model,
    make_tokenizer,
    rows,
    save_model,
    script_words,
    scripted,
    shell,
)
from trainer import FarmGRPOTrainer, RemoteEpisodes
from trainer.divergence import Divergence
from trainer.run_log import MetricsLog
from trainer.training import TrainingPlan, _config, train

TOO_LARGE = 1e40
"""A learning rate that is infinite in the precision of weights."""


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_shown_and_ends_the_run_before_it_saves(
    episodes: RemoteEpisodes, tmp_path: Path, number: str
) -> None:
    def compute_loss(self: Any, *args: Any, **options: Any) -> Any:
        return FarmGRPOTrainer._compute_loss(self, *args, **options) + float(number)

    scripts: list[list[Turn]] = [[[SUBMIT], []], [[]]]
    tokenizer = make_tokenizer([*script_words(scripts), "fix"])
    plan = TrainingPlan(model="made", tasks=[weekly_sales()], cpu=True, output_dir=tmp_path, max_completion_length=64)
    trainer = scripted(FarmGRPOTrainer, scripts, _compute_loss=compute_loss)(
        model=make_model(tokenizer),
        args=_config(plan),
        train_dataset=rows(weekly_sales()),
        processing_class=tokenizer,
        environment_factory=episodes,
        callbacks=[MetricsLog(tmp_path / "metrics.jsonl", lambda step: None), Divergence()],
    )
    with pytest.raises(FarmError, match=rf"diverged in step 1 \(loss {number}.*smaller --learning-rate"):
        trainer.train()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, None)]
    assert not list(tmp_path.glob("checkpoint*"))


def test_weights_that_diverged_are_neither_saved_nor_gone_on_with(farm: Field, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", [shell("true"), SUBMIT], prompt=weekly_sales().prompt)
    output = tmp_path / "out"
    plan = TrainingPlan(str(model), [weekly_sales()], cpu=True, output_dir=output, max_completion_length=48)
    with pytest.raises(FarmError, match=r"diverged in step 1 .*another --output-dir"):
        train(replace(plan, learning_rate=TOO_LARGE, output_dir=tmp_path / "other"), farm.settings, NoBars())
    assert not list((tmp_path / "other").glob("checkpoint*"))
    train(plan, farm.settings, NoBars())
    further = replace(plan, max_steps=2, resume=True)
    with pytest.raises(FarmError, match=r"diverged in step 2 .*--resume goes on from step 1"):
        train(replace(further, learning_rate=TOO_LARGE), farm.settings, NoBars())
    assert [path.name for path in sorted(output.glob("checkpoint*"))] == ["checkpoint", "checkpoint-1"]
    weights = load_file(output / "checkpoint-1" / "model.safetensors")
    assert all(bool(weight.isfinite().all()) for weight in weights.values())
    weights["transformer.ln_f.bias"] = torch.full((32,), float("nan"))
    save_file(weights, output / "checkpoint-1" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=r"weights of step 1 hold NaN.*ln_f\.bias"):
        train(further, farm.settings, NoBars())
