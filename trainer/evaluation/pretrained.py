"""A model as its checkpoint holds it, for training and evaluation alike.

What always holds: every weight was read from the checkpoint and is a number; of how the checkpoint's author liked to
generate nothing is left but which tokens end a turn, pad and begin, and which are never said. Anything else there, such
as beams, would fail in mid-run, or let a token be sampled by other odds than those that are trained or compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from orchestrator.errors import SettingsError
from trainer.evaluation.chat_template import ChatTemplate

logger = logging.getLogger(__name__)


def load_whole(load: Callable[..., Any], name: str, **options: Any) -> PreTrainedModel:
    """What `load`, a `from_pretrained`, makes of a checkpoint.

    Raises SettingsError when weights are missing there, which transformers would make up at random, or no numbers.
    """
    model, found = load(name, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        raise SettingsError(
            f"--model {name}: {len(missing)} of its tensors are missing, {_some(missing)}; copy or save the checkpoint "
            "again: they would be random"
        )
    if (wrong := not_finite(model)) is not None:
        raise SettingsError(f"--model {name}: {wrong} holds NaN or infinity; choose a checkpoint from before that")
    return cast("PreTrainedModel", model)


def not_finite(model: torch.nn.Module) -> str | None:
    """The name of the first weight that holds NaN or infinity; None when all are numbers.

    Quantized weights, of eight bits or fewer, and those that lie elsewhere are not looked at.
    """
    seen = ((name, it) for name, it in model.named_parameters() if it.is_floating_point() and it.element_size() > 1)
    return next((name for name, weight in seen if not weight.is_meta and not bool(weight.isfinite().all())), None)


def generate_plainly(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Leave of a model's generation settings what the module says; returns the tokens that end a turn.

    A turn's end that the template writes becomes the tokenizer's `eos_token` unless that is one: there TRL cuts a turn
    before it appends a tool's result, and what the template writes between the two would be lost otherwise. One at
    which neither model nor tokenizer stops becomes a stop token too: the model would write on, and make up results of
    its own calls. Both are changed in place.
    """
    had: GenerationConfig = model.generation_config
    stops = _ids(had.eos_token_id, tokenizer.eos_token_id)
    ends = ChatTemplate(tokenizer).turn_ends() if tokenizer.chat_template else []  # a processor may hold the template
    if new := [end for end in ends if tokenizer.convert_tokens_to_ids(end) not in stops]:
        logger.warning("the model's chat template ends a turn with %s: taken as its stop token", " and ".join(new))
        stops = _ids([tokenizer.convert_tokens_to_ids(end) for end in reversed(new)], stops)
    if new or (ends and tokenizer.eos_token not in ends):
        tokenizer.eos_token = (new or ends)[-1]
    model.generation_config = GenerationConfig(
        eos_token_id=stops or None,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=had.bos_token_id,
        suppress_tokens=had.suppress_tokens,
    )
    return stops


def _ids(*given: int | Sequence[int] | None) -> list[int]:
    """All of them once, in order."""
    several = [[] if ids is None else [ids] if isinstance(ids, int) else ids for ids in given]
    return list(dict.fromkeys(int(token) for ids in several for token in ids))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
