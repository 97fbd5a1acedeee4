"""The tools as a model is shown them: those of the training environment, so that both read the same descriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from trainer.environment import RemoteEpisode

_SHOWN = RemoteEpisode(cast(Any, None))
"""Nothing is called on it: making one allocates nothing, and a tool is described by its signature and docstring."""

TOOLS: tuple[Callable[..., str], ...] = (_SHOWN.submit, _SHOWN.terminal)
