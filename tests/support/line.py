"""Episodes in the limiter's line, each waiting on a thread of its own, and those that have their permit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import Admission
from orchestrator.records import EpisodeSpec
from orchestrator.rows import Lease
from tests.support.bare_farm import a_receipt, admit, leased
from tests.support.waiting import wait_until

PROMPT_SECONDS = 2.5
"""A waiter that has to ask again by itself does so after BLOCK_SECONDS = 5."""


class Waiter(threading.Thread):
    """An episode that waits in line; `granted` is what it got and `at` when."""

    def __init__(self, farm: Farm, *, check: Callable[[], None] = lambda: None, reservation: str | None = None) -> None:
        super().__init__(daemon=True)
        self.spec, self.lease = leased(farm)
        self.granted: Admission | BaseException | None = None
        self.at = 0.0
        self._farm, self._check, self._reservation = farm, check, reservation
        self.start()

    @property
    def episode_id(self) -> str:
        return self.spec.episode_id

    def run(self) -> None:
        try:
            self.granted = self._farm.limiter.admit(
                self.episode_id, reservation_id=self._reservation, wait_seconds=20, check=self._check
            )
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.granted = error
        self.at = time.monotonic()

    def wait_in_line(self) -> None:
        """Until it stands in line, and a millisecond longer: places are counted in those."""
        wait_until(
            lambda: self._farm.redis.zscore(Keys.WAITERS, self.episode_id), description=f"{self.episode_id} in line"
        )
        now = self._farm.ledger.now()
        wait_until(lambda: self._farm.ledger.now() > now + 0.002, description="the next millisecond")

    def expect_prompt(self, since: float) -> None:
        """Granted soon after `since`."""
        self.join(10)
        assert self.granted is Admission.GRANTED
        assert self.at - since < PROMPT_SECONDS, f"woken after {self.at - since:.1f} s"

    def end(self) -> None:
        self.join(20)
        self._farm.ledger.commit(a_receipt(self.spec), self.lease.token)


def running(farm: Farm) -> tuple[EpisodeSpec, Lease]:
    """An episode that has its permit."""
    spec, lease = leased(farm)
    assert admit(farm, spec.episode_id) is Admission.GRANTED
    return spec, lease


def end(farm: Farm, *episodes: tuple[EpisodeSpec, Lease]) -> None:
    for spec, lease in episodes:
        farm.ledger.commit(a_receipt(spec), lease.token)


def queue_up(farm: Farm, count: int) -> list[Waiter]:
    """So many waiters, one after another."""
    waiters = []
    for _ in range(count):
        waiters.append(Waiter(farm))
        waiters[-1].wait_in_line()
    return waiters
