"""Episodes in the line of those who create, each waiting on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from orchestrator.creations import Creation
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.vocabulary import Role
from tests.support.bare_farm import run_episode
from tests.support.waiting import wait_until


class Creator(threading.Thread):
    """Waits for leave to create; `at` is when it had it, `error` what it got instead."""

    def __init__(
        self,
        farm: Farm,
        episode_id: str,
        role: Role = Role.POLICY,
        *,
        wait_seconds: float = 20,
        check: Callable[[], None] = lambda: None,
        creation: Creation | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.creation = creation or creation_of(farm, episode_id, role)
        self.at = 0.0
        self.error: BaseException | None = None
        self._farm, self._wait, self._check = farm, wait_seconds, check
        self.start()

    def run(self) -> None:
        try:
            self.creation.wait(wait_seconds=self._wait, check=self._check)
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.error = error
        self.at = time.monotonic()

    def in_line(self) -> Creator:
        """Until it stands in line."""
        wait_until(
            lambda: self._farm.redis.zscore(Keys.CREATORS, self.creation.creation_id) is not None,
            description=f"{self.creation.episode_id} in line",
        )
        return self

    def granted(self) -> float:
        """When it had its leave."""
        self.join(20)
        assert not self.is_alive(), "still in line"
        assert self.error is None, repr(self.error)
        return self.at

    @property
    def waiting(self) -> bool:
        return self.is_alive()


def creation_of(farm: Farm, episode_id: str, role: Role = Role.POLICY) -> Creation:
    """A creation of an episode that runs, as far as the limiter can see."""
    run_episode(farm.redis, episode_id)
    return farm.limiter.creation(episode_id, role)


def create(farm: Farm, episode_id: str, role: Role = Role.POLICY, *, wait_seconds: float = 20) -> Creation:
    """A creation that has its leave."""
    creation = creation_of(farm, episode_id, role)
    creation.wait(wait_seconds=wait_seconds, check=lambda: None)
    return creation
