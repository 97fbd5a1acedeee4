"""Environments that lose their sandbox: a command that says `lose` has it deleted, as a host that dies would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.pool import Pool
from tests.support.tiny_policy import Turn, shell
from trainer import RemoteEpisodes

LOSE: list[Turn] = [[shell("lose")], [shell("ls")], []]


class LosingEpisodes(RemoteEpisodes):
    """`delete` deletes the policy sandbox of the episode with this id."""

    def __init__(self, pool: Pool, delete: Callable[[str], None], **options: Any) -> None:
        super().__init__(pool, **options)
        self._delete = delete

    def __call__(self) -> Any:
        made = super().__call__()
        act = made._act

        def act_or_lose(call: Any) -> str:
            episode = made._episode
            assert episode is not None
            answer = act(call)
            if "lose: command not found" in answer:
                self._delete(episode.episode_id)
            return answer

        made._act = act_or_lose  # type: ignore[method-assign]
        return made
