"""Which saved states a run is resumed from, and what is said of those that it is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from orchestrator.errors import SettingsError
from tests.support.policies import weekly_sales
from tests.support.tiny_policy import SUBMIT, make_model, make_tokenizer
from trainer.evaluation.chat_template import load_tokenizer
from trainer.saved_states import damage, refuse_another_model
from trainer.training import TrainingPlan, checkpoint_of

Damage = Callable[[Path], object]


def save(directory: Path, *words: str) -> Path:
    tokenizer = make_tokenizer([SUBMIT, *words])
    make_model(tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def save_state(directory: Path, step: int) -> None:
    state = save(directory / f"checkpoint-{step}", "fix")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, state / name)
    (state / "trainer_state.json").write_text(json.dumps({"global_step": step}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model", "fix")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Of a run with two states."""
    for step in (1, 2):
        save_state(tmp_path / "out", step)
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    return tmp_path / "out"


def plan(model: Path, out: Path) -> TrainingPlan:
    return TrainingPlan(model=str(model), tasks=[weekly_sales()], output_dir=out, max_steps=9, resume=True)


def cut(name: str) -> Damage:
    """Half of the file."""
    return lambda state: (state / name).write_bytes((state / name).read_bytes()[: (state / name).stat().st_size // 2])


def removed(name: str) -> Damage:
    return lambda state: (state / name).unlink()


def written(name: str, text: str) -> Damage:
    return lambda state: (state / name).write_text(text)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut("model.safetensors"), "model.safetensors is cut short"),
        (removed("model.safetensors"), "model.safetensors is missing"),
        (written("model.safetensors.index.json", '{"weight_map": []}'), "index.json is damaged"),
        (written("model.safetensors.index.json", '{"weight_map": {"a": "part-2"}}'), "part-2 is missing"),
        (
            written("model.safetensors.index.json", '{"weight_map": {"a": "model.safetensors"}}'),
            "lacks 1 of its",
        ),
        (cut("optimizer.pt"), "optimizer.pt is cut short"),
        (removed("optimizer.pt"), "optimizer.pt is missing"),
        (removed("scheduler.pt"), "scheduler.pt is missing"),
        (cut("rng_state.pth"), "rng_state.pth is cut short"),
        (cut("trainer_state.json"), "trainer_state.json is not JSON"),
        (written("trainer_state.json", "[]"), "does not tell of step 2"),
        (written("trainer_state.json", '{"global_step": 1}'), "does not tell of step 2"),
        (removed("trainer_state.json"), "trainer_state.json: No such file"),
    ],
)
def test_a_damaged_state_is_left_out_for_an_earlier_one(
    model: Path, out: Path, caplog: pytest.LogCaptureFixture, harm: Damage, said: str
) -> None:
    assert checkpoint_of(plan(model, out)) == str(out / "checkpoint-2")
    harm(out / "checkpoint-2")
    assert checkpoint_of(plan(model, out)) == str(out / "checkpoint-1")
    assert said in caplog.text
    shutil.rmtree(out / "checkpoint-1")
    with pytest.raises(SettingsError, match="nothing to resume") as refused:
        checkpoint_of(plan(model, out))
    assert said in str(refused.value)


def test_what_several_processes_saved_in_shards_is_whole(out: Path) -> None:
    state = out / "checkpoint-2"
    for name in ("optimizer.pt", "model.safetensors"):
        (state / name).unlink()
    (state / "optimizer_0").mkdir()
    assert damage(state) is None


def other_words(model: Path) -> None:
    save(model, "mend")


def other_sizes(model: Path) -> None:
    save(model, "fix", "more")


def other_template(model: Path) -> None:
    file = model / "chat_template.jinja"
    file.write_text(file.read_text() + "\n")


@pytest.mark.parametrize(
    ("change", "what"), [(other_words, "vocabulary"), (other_sizes, "vocab_size"), (other_template, "chat template")]
)
def test_the_state_of_another_model_is_refused(model: Path, out: Path, change: Damage, what: str) -> None:
    change(model)
    with pytest.raises(SettingsError, match=f"another .*{what}"):
        checkpoint_of(plan(model, out))


@pytest.mark.parametrize("line", [b"no json", b"[]", b'{"step": null}', b"\xff"])
def test_a_line_that_is_no_line_of_numbers_is_named(model: Path, out: Path, line: bytes) -> None:
    (out / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(SettingsError, match=r"metrics\.jsonl:2: "):
        checkpoint_of(plan(model, out))


def test_a_template_with_the_line_ends_of_another_system_is_the_same(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    template = tokenizer.chat_template
    (model / "chat_template.jinja").unlink(missing_ok=True)
    described = json.loads((model / "tokenizer_config.json").read_text())
    described["chat_template"] = template.replace("\n", "\r\n") + "\r\n"
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    assert "\r\n" in load_tokenizer(str(model)).chat_template
    state = model.parent / "checkpoint-1"
    shutil.copytree(model, state)
    load_tokenizer(str(model)).save_pretrained(state)
    assert "\r\n" not in load_tokenizer(str(state)).chat_template
    refuse_another_model(state, str(model))
