"""A model as its checkpoint holds it, for training and evaluation alike.

What always holds: every weight was read from the checkpoint and is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from orchestrator.errors import SettingsError


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


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
