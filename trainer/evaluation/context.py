"""How many tokens a model takes, and which prompts leave no room to answer in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.errors import FarmError

_UNBOUNDED = 2**31
_NAMED = 5


def context_of(config: Any) -> int:
    """The tokens that a model of this configuration takes; more than any prompt has where it names none."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0) or _UNBOUNDED


def refuse_long_prompts(sizes: Mapping[str, int], context: int) -> None:
    """Raise FarmError that names the tasks whose prompts, of so many tokens, leave no room to answer."""
    if long := [f"{name} has {size}" for name, size in sizes.items() if size >= context]:
        more = f" and {len(long) - _NAMED} tasks more are too long" if len(long) > _NAMED else ""
        raise FarmError(
            f"a prompt, tools included, has to have fewer than the {context} tokens that the model takes: "
            f"{', '.join(long[:_NAMED])}{more}; leave these tasks out or shorten their prompts"
        )
