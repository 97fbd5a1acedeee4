"""Policies and gradients: what trains against the pool. Imports `orchestrator`, never `workers`.

The names below are loaded when they are asked for: TRL and torch come with the extra `train` and take seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.environment import RemoteEpisode, RemoteEpisodes
    from trainer.grpo import FarmGRPOTrainer

__all__ = ["FarmGRPOTrainer", "RemoteEpisode", "RemoteEpisodes"]

_HOMES = {
    "FarmGRPOTrainer": "trainer.grpo",
    "RemoteEpisode": "trainer.environment",
    "RemoteEpisodes": "trainer.environment",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
