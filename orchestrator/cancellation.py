"""Ending episodes on request: some by name, a group's, or a run's.

What always holds: a queued episode ends here and now, with a receipt and without ever having had a sandbox; a running
one is ended by its slot, which deletes and confirms first; each has exactly one receipt, also when both come at once.
Episodes submitted after the request are not touched by it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from orchestrator.endings import end_queued
from orchestrator.errors import FarmError
from orchestrator.farm import Farm
from orchestrator.receipts import Receipts
from orchestrator.vocabulary import EpisodeState, Outcome

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
"""Pause between two looks at what still runs: the slots themselves look once a second."""


@dataclass(frozen=True)
class Ending:
    """What became of the episodes that were asked to end."""

    outcomes: dict[str, int] = field(default_factory=dict)
    """Of those that have their receipt; some may have ended otherwise just before."""
    open: tuple[str, ...] = ()
    """Episodes without a receipt yet."""
    unsettled: tuple[str, ...] = ()
    """Sandboxes (allocations) of ended episodes that are not confirmed absent yet."""

    @property
    def complete(self) -> bool:
        """Whether all have ended and nothing of them can still run."""
        return not self.open and not self.unsettled

    def as_json(self) -> dict[str, Any]:
        """For a program's eyes."""
        return {"outcomes": self.outcomes, "open": list(self.open), "unsettled": list(self.unsettled)}


class Cancellation:
    """Finds episodes, asks for their end and waits for it."""

    def __init__(self, farm: Farm) -> None:
        self._ledger = farm.ledger
        self._queue = farm.queue
        self._receipts = Receipts(farm.redis, farm.ledger.allocations)

    def open_of(self, *, run_id: str | None = None, group_id: str | None = None) -> list[str]:
        """Open episodes of a run, of a group, or of a group of a run, newest first.

        Raises FarmError for a run that the farm does not know, and for a group of which nothing is open nor has ended.
        """
        rows = self.matching(run_id=run_id, group_id=group_id)
        if rows:
            return rows
        if group_id is not None:
            if not self._receipts.knows_group(group_id, run_id=run_id):
                raise FarmError(
                    f"nothing is open in group {group_id!r} and no recent receipt is of it: it never was, or ended "
                    f"long ago; look among all receipts: rollout-farm receipts --group {group_id}"
                )
        elif run_id is not None and not self._receipts.knows_run(run_id):
            raise FarmError(f"no run {run_id!r}: the farm does not know it; see what there is: rollout-farm receipts")
        return rows

    def matching(self, *, run_id: str | None, group_id: str | None) -> list[str]:
        """As `open_of`, where finding nothing is no error."""
        rows = [
            row.episode_id
            for row in self._ledger.open_rows()
            if run_id in (None, row.run_id) and group_id in (None, row.group_id)
        ]
        return rows[::-1]  # slots take the oldest first: from behind, fewer begin while we go through them

    def known(self, episodes: Iterable[str]) -> list[str]:
        """These episodes; raises FarmError for one that the farm does not know."""
        named = list(dict.fromkeys(episodes))
        for episode in named:
            if not self._ledger.knows(episode):
                raise FarmError(f"no episode {episode!r}: the farm does not know it; see: rollout-farm receipts")
        return named

    def ask(self, episodes: Sequence[str]) -> None:
        """Ask for the end of all of them: queued ones have their receipts when this returns.

        One that cannot be ended is logged and keeps no other waiting: the reconciler ends it.
        """
        queued = [episode for episode in episodes if self._ledger.cancel(episode) is EpisodeState.QUEUED]
        for episode in queued:
            row = self._ledger.row(episode)
            try:
                if row is not None:
                    end_queued(self._ledger, self._queue, row, Outcome.CANCELLED)
            except (FarmError, ValidationError) as error:
                logger.error("not ended: %s", error, extra={"episode": episode})

    def wait(self, episodes: Sequence[str], seconds: float) -> Ending:
        """What became of them once all have ended and are settled, or after `seconds`."""
        ends = time.monotonic() + seconds
        seen: Counter[str] = Counter()
        unsettled: dict[str, None] = {}
        running = list(episodes)
        while True:
            running = self._look(running, seen, unsettled)
            unsettled = self._still_unsettled(unsettled)
            left = ends - time.monotonic()
            if left <= 0 or not (running or unsettled):
                return Ending(dict(seen.most_common()), tuple(running), tuple(unsettled))
            time.sleep(min(_LOOK_SECONDS, left))

    def _look(self, episodes: list[str], seen: Counter[str], unsettled: dict[str, None]) -> list[str]:
        """Count those that have ended and note their sandboxes; those that have not."""
        running = []
        for episode, progress in zip(episodes, self._ledger.progress(episodes), strict=True):
            if progress is not None and progress.outcome is not None:
                seen[progress.outcome] += 1
                unsettled |= dict.fromkeys(progress.unsettled)
            elif progress is not None:
                running.append(episode)
            elif (settled := self._ledger.receipt(episode)) is not None:  # its row has expired just before its receipt
                seen[settled.receipt.outcome] += 1
        return running

    def _still_unsettled(self, names: dict[str, None]) -> dict[str, None]:
        rows = self._ledger.allocations.each(list(names))
        return {row.allocation_id: None for row in rows if row is not None and not row.state.settled}
