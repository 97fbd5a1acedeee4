"""Deletions that failed, kept where someone looks: logged and listed over HTTP.

OpenEnv swallows whatever a session's close() raises, and calls it a second time on the event loop's thread. So closing
never raises here: it reports.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from orchestrator.errors import ProviderError
from workers.terminus.wire import to_wire

logger = logging.getLogger(__name__)

_KEPT = 1000
"""Failures remembered; the farm's ledger, not this list, is what accounts for every sandbox."""


class TeardownFailures:
    """The failed deletions of one server; may be used from any thread."""

    def __init__(self) -> None:
        self._failures: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def report(self, sandbox_id: str, error: ProviderError) -> None:
        """Record one failed deletion; never raises."""
        logger.error("sandbox not deleted", extra={"sandbox_id": sandbox_id, "failure": to_wire(error)})
        with self._lock:
            self._failures.append({"sandbox_id": sandbox_id, "at": time.time(), **to_wire(error)})

    def rows(self) -> list[dict[str, Any]]:
        """The failures so far, oldest first."""
        with self._lock:
            return list(self._failures)
