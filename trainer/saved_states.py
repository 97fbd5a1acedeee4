"""The states that a run saved, `checkpoint-<step>`: which are whole, and whether one is of this model.

What always holds: a state is judged by its files before anything is loaded; a process that was killed while it saved,
or a full disk, leaves a part of one, and that is never trained on.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from orchestrator.errors import SettingsError
from trainer.evaluation.chat_template import load_tokenizer

_SHARDED = ("global_step*", "optimizer_*", "pytorch_model_fsdp*")
"""What DeepSpeed and FSDP save in place of one file of weights and one of the optimizer."""

_SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def saved_states(directory: Path) -> list[Path]:
    """What was saved of a run, also in part, in order of the steps."""
    found = directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if directory.is_dir() else []
    return sorted((path for path in found if path.is_dir() and path.name.rpartition("-")[2].isdigit()), key=step_of)


def step_of(state: Path | str | None) -> int:
    """The step after which it was saved; 0 for none."""
    return 0 if state is None else int(str(state).rpartition("-")[2])


def damage(state: Path) -> str | None:
    """What of this state is missing or cut short; None when it is whole."""
    try:
        written = json.loads((state / TRAINER_STATE_NAME).read_bytes())  # what transformers writes last
    except OSError as error:
        return f"{TRAINER_STATE_NAME}: {error.strerror}"
    except (ValueError, RecursionError):
        return f"{TRAINER_STATE_NAME} is not JSON"
    if not isinstance(written, dict) or written.get("global_step") != step_of(state):
        return f"{TRAINER_STATE_NAME} does not tell of step {step_of(state)}"
    if not any(True for pattern in _SHARDED for _ in state.glob(pattern)):
        for name in (OPTIMIZER_NAME, SCHEDULER_NAME):
            if not (state / name).is_file():
                return f"{name} is missing"
        if (wrong := _damaged_weights(state)) is not None:
            return wrong
    broken = (path.name for path in sorted(state.glob("*.pt*")) if not zipfile.is_zipfile(path))  # how torch saves
    return next((f"{name} is cut short or damaged" for name in broken), None)


def refuse_another_model(state: Path, model: str) -> None:
    """Raise SettingsError when the state is of a model of other sizes, words or chat template than `model`.

    Transformers would load its weights below this one's tokenizer, without a word where the sizes are the same.
    """
    own, given = _described(str(state)), _described(model)
    other = [name for name in own if own[name] != given[name]]
    if other:
        raise SettingsError(
            f"--model {model} is not the model of {state}: another {', '.join(other)}; give the --model that the run "
            "was started with, or choose another --output-dir"
        )


def _damaged_weights(state: Path) -> str | None:
    names: dict[str, set[str]] = {SAFE_WEIGHTS_NAME: set()}  # a file and the tensors that it has to hold
    index = state / SAFE_WEIGHTS_INDEX_NAME
    if index.exists():
        try:
            tensors = json.loads(index.read_bytes())["weight_map"]
            names = {name: {it for it in tensors if tensors[it] == name} for name in tensors.values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"{index.name} is damaged"
    for name in sorted(names):
        if not (state / name).is_file():
            return f"{name} is missing"
        try:
            with safe_open(state / name, framework="pt") as file:  # reads what it should hold, compares its length
                held = set(file.keys())
        except (SafetensorError, OSError):
            return f"{name} is cut short or damaged"
        if lacking := names[name] - held:
            return f"{name} lacks {len(lacking)} of its tensors, {min(lacking)}"
    return None


def _described(name: str) -> dict[str, Any]:
    tokenizer = load_tokenizer(name)
    try:
        config = AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"{name}: its config.json cannot be read ({str(error).splitlines()[0]})") from None
    sizes = {size: getattr(config, size, None) for size in _SIZES}
    return {**sizes, "vocabulary": tokenizer.get_vocab(), "chat template": _lines(tokenizer.chat_template)}


def _lines(template: Any) -> Any:
    """A state holds its template in a file of its own, with the line ends of text files."""
    return template.replace("\r\n", "\n") if isinstance(template, str) else template
