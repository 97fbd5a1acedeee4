"""A checkpoint as it is taken: whole, of numbers, stopping where its template ends a turn, and without a taste."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from deploy.training_report import NoBars
from orchestrator.errors import SettingsError
from tests.support.farm import Field
from tests.support.policies import weekly_sales
from tests.support.tiny_policy import SUBMIT, call, make_model, make_tokenizer
from trainer.evaluation.chat_model import load_chat_model
from trainer.evaluation.pretrained import load_whole
from trainer.training import TrainingPlan, train

LOOK = call("terminal", command="ls")
END, TEXT_END = "<|im_end|>", "<|endoftext|>"


def save(directory: Path, *, eos: str = END) -> Path:
    tokenizer = make_tokenizer([LOOK, SUBMIT, TEXT_END])
    tokenizer.eos_token = eos
    make_model(tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


def change_weights(directory: Path, change: Any) -> None:
    weights = load_file(directory / "model.safetensors")
    save_file(change(weights), directory / "model.safetensors", metadata={"format": "pt"})


# weights


def test_a_checkpoint_without_some_of_its_tensors_is_refused(farm: Field, model: Path, tmp_path: Path) -> None:
    change_weights(model, lambda weights: {name: it for name, it in weights.items() if "mlp" not in name})
    with pytest.raises(SettingsError, match=r"4 of its tensors are missing, transformer\.h\.0\.mlp"):
        load_chat_model(str(model), device="cpu")
    plan = TrainingPlan(str(model), [weekly_sales()], cpu=True, output_dir=tmp_path / "out")
    with pytest.raises(SettingsError, match="tensors are missing"):
        train(plan, farm.settings, NoBars())
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_tied_weights_are_not_missing(model: Path) -> None:
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    assert load_whole(AutoModelForCausalLM.from_pretrained, str(model)).lm_head.weight.isfinite().all()
