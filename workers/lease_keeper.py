"""The thread that keeps a slot's lease alive while its main thread works, and the checks of that main thread.

What always holds: the lease is not renewed past the budget of the phase the episode is in, so that a process that
hangs is found out; once the lease is lost, every check raises LeaseLost.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

from redis.exceptions import RedisError

from orchestrator.errors import LeaseLost
from orchestrator.ledger import Ledger
from orchestrator.rows import Lease

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """Renews a lease every `renew_seconds`; use as a context manager around the episode."""

    def __init__(self, ledger: Ledger, lease: Lease, *, renew_seconds: float, lost_seconds: float) -> None:
        self.lease = lease
        self._ledger = ledger
        self._renew = renew_seconds
        self._lost_after = lost_seconds
        self._until = time.monotonic() + lost_seconds
        self._renewed = time.monotonic()
        self._lost = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def allow(self, seconds: float) -> None:
        """The phase that begins now may last this long; past it the lease runs out."""
        self._until = time.monotonic() + seconds

    def check(self) -> None:
        """Raise LeaseLost when the episode is no longer ours."""
        if self._lost.is_set() or time.monotonic() - self._renewed > self._lost_after:
            raise LeaseLost(f"{self.lease.episode_id}: the lease is lost")

    def _run(self) -> None:
        while not self._stop.wait(self._renew):
            if time.monotonic() > self._until:
                logger.error("phase budget passed; lease no longer renewed", extra={"episode": self.lease.episode_id})
                self._lost.set()
                return
            asked = time.monotonic()
            try:
                held = self._ledger.renew(self.lease, lease_seconds=self._lost_after)
            except RedisError as error:
                logger.warning("lease not renewed: %s", error)
                continue
            self._renewed = asked
            if not held:
                self._lost.set()
                return
