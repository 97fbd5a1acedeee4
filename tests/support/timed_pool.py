"""A pool whose episodes take exact times and no resources: what remains is TRL and the trainer's own code.

Replaces `orchestrator.pool.Pool` under RemoteEpisodes. An episode becomes ready a while after it was submitted, as on
the farm; a command answers with how many were run before it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from orchestrator.settings import Budgets
from orchestrator.tasks import Task


@dataclass(frozen=True)
class Times:
    """Seconds."""

    reset: float = 0.0
    tool: float = 0.0
    reward: float = 0.0


@dataclass
class TimedEpisode:
    """Implements what RemoteEpisode uses of `orchestrator.episodes.Episode`; its reward counts its commands."""

    episode_id: str
    times: Times
    ready_at: float
    log: list[str] = field(default_factory=list)

    def reset(self) -> str:
        """Wait until it is ready."""
        time.sleep(max(0.0, self.ready_at - time.monotonic()))
        return "ready"

    def terminal(self, command: str) -> str:
        """One command; `boom` raises."""
        self.reset()
        time.sleep(self.times.tool)
        self.log.append(command)
        if command == "boom":
            raise RuntimeError("boom")
        return f"ok{len(self.log)}"

    def submit(self) -> str:
        """The last action."""
        self.reset()
        time.sleep(self.times.tool)
        self.log.append("submit")
        return "bye"

    def reward(self) -> float:
        """A tenth for each action."""
        self.reset()
        time.sleep(self.times.reward)
        return len(self.log) / 10

    def cancel(self) -> None:
        """Nothing runs."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        """It has ended."""


class TimedPool:
    """Implements what RemoteEpisodes uses of Pool."""

    run_id = "run-timed"
    settings = SimpleNamespace(budgets=Budgets())
    ledger = SimpleNamespace(state=lambda episode_id: None)

    def __init__(self, times: Times | None = None) -> None:
        self.times = times or Times()
        self.episodes: list[TimedEpisode] = []

    def submit(self, task: Task, **options: Any) -> TimedEpisode:
        """An episode that is on its way."""
        ready_at = time.monotonic() + self.times.reset
        made = TimedEpisode(f"e-{len(self.episodes)}", self.times, ready_at)
        self.episodes.append(made)
        return made

    def forget(self, episode: TimedEpisode) -> None:
        """What ran is still looked at."""

    def reserve(self, count: int, *, wait_seconds: float = 0.0) -> Any:
        """There is always room."""
        return SimpleNamespace(reservation_id="reservation-timed", release=lambda: None)
