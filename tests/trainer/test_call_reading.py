"""A model whose calls would be read as others is not taken, whoever takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import trl.chat_template_utils
from trl.chat_template_utils import add_response_schema

from orchestrator.errors import SettingsError
from orchestrator.pool import Pool
from tests.support.policies import weekly_sales
from tests.support.timed_pool import TimedPool
from tests.support.tiny_policy import grpo_config, make_model, make_tokenizer, rows
from trainer import FarmGRPOTrainer, RemoteEpisodes
from trainer.async_grpo import FarmRolloutWorker
from trainer.evaluation.call_reading import refuse_misread_calls
from trainer.evaluation.chat_template import load_tokenizer

TEMPLATES = Path(trl.chat_template_utils.__file__).with_name("chat_templates")
CUT = r"what its chat template writes: terminal\(\"python3 -c 'print\(1, \(2\)\)'\"\) becomes terminal\('python3 -c"


def tokenizer_of(family: str) -> Any:
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return add_response_schema(tokenizer)


@pytest.mark.parametrize(
    "family", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_2", "gemma4_v5", "glm4moe", "gptoss", "nemotron_3_nano"]
)
def test_a_template_whose_calls_are_read_as_they_are_written_is_taken(family: str) -> None:
    refuse_misread_calls(tokenizer_of(family), family)


@pytest.mark.parametrize("family", ["lfm2_v2", "lfm2_2_5"])
def test_a_parser_that_cuts_commands_is_refused(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=f"--model {tmp_path}: .*{CUT}"):
        load_tokenizer(str(tmp_path))


def test_so_it_is_by_who_is_given_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("lfm2_2_5")
    with RemoteEpisodes(cast(Pool, TimedPool())) as episodes, pytest.raises(SettingsError, match=CUT):
        FarmGRPOTrainer(
            model=make_model(tokenizer),
            args=grpo_config(tmp_path, batch=2),
            train_dataset=rows(weekly_sales()),
            processing_class=tokenizer,
            environment_factory=episodes,
        )
    with pytest.raises(SettingsError, match=CUT):
        FarmRolloutWorker(cast(Any, None), processing_class=tokenizer)


def test_a_parser_of_ones_own_that_knows_nothing_of_the_template_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer([])
    tokenizer.response_template = {**tokenizer.response_template, "fields": {"content": {"content": "text"}}}
    with pytest.raises(SettingsError, match=r"submit\(\) becomes no call"):
        refuse_misread_calls(tokenizer, "own")
