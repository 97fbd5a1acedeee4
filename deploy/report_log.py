"""What an orchestrator's log says of its rounds: what was done, and what could not be.

What always holds: an item is logged when it is first met and when its reason changes, not once a round; the list as it
stands is in Redis (orchestrator/unresolved.py), which `rollout-farm status` shows.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.reconciler import Report
    from orchestrator.unresolved import Kind

logger = logging.getLogger(__name__)


class ReportLog:
    """Logs one report after another."""

    def __init__(self) -> None:
        self._known: dict[tuple[Kind, str], str] = {}

    def add(self, report: Report) -> None:
        """Log what this round did, and what is new of what it could not do."""
        done = {
            "enqueued": report.enqueued,
            "finished": report.finished,
            "settled": report.settled,
            "orphans_deleted": report.orphans,
        }
        if any(done.values()):
            logger.warning("reconciled", extra={name: ",".join(ids) for name, ids in done.items() if ids})
        for (kind, name), reason in report.failures.items():
            if self._known.get((kind, name)) != reason:
                logger.error("unresolved", extra={str(kind): name, "error": reason})
        self._known = dict(report.failures)
