"""A model as its checkpoint holds it, for training and evaluation alike.

What always holds: every weight was read from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from transformers import PreTrainedModel

from orchestrator.errors import SettingsError


def load_whole(load: Callable[..., Any], name: str, **options: Any) -> PreTrainedModel:
    """What `load`, a `from_pretrained`, makes of a checkpoint.

    Raises SettingsError when weights are missing there, which transformers would make up at random.
    """
    model, found = load(name, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        raise SettingsError(
            f"--model {name}: {len(missing)} of its tensors are missing, {_some(missing)}; copy or save the checkpoint "
            "again: they would be random"
        )
    return cast("PreTrainedModel", model)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
