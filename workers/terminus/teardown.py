"""Deletions that failed, kept where someone looks: logged, handed to a callback, listed over HTTP.

OpenEnv swallows whatever a session's close() raises, and calls it a second time on the event loop's thread. So closing
never raises here: it reports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from orchestrator.errors import ProviderError
from workers.terminus.wire import to_wire

logger = logging.getLogger(__name__)

TeardownCallback = Callable[[str, ProviderError], None]

_KEPT = 1000
"""Failures remembered; the farm's ledger, not this list, is what accounts for every sandbox."""


class TeardownFailures:
    """The failed deletions of one server; may be used from any thread."""

    def __init__(self, callback: TeardownCallback | None = None) -> None:
        self._callback = callback
        self._failures: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def report(self, sandbox_id: str, error: ProviderError) -> None:
        """Record one failed deletion; never raises."""
        logger.error("sandbox not deleted", extra={"sandbox_id": sandbox_id, "failure": to_wire(error)})
        with self._lock:
            self._failures.append({"sandbox_id": sandbox_id, "at": time.time(), **to_wire(error)})
        if self._callback is None:
            return
        try:
            self._callback(sandbox_id, error)
        except Exception:  # the outermost loop of a teardown: nobody above would see it
            logger.exception("teardown callback failed", extra={"sandbox_id": sandbox_id})

    def rows(self) -> list[dict[str, Any]]:
        """The failures so far, oldest first."""
        with self._lock:
            return list(self._failures)
