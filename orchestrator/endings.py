"""Ending an episode without running it: its receipt, and the one way in which a queued one ends.

What always holds: whoever ends a queued episode takes it first, as a slot would, so that it has one receipt whoever
else comes; its job leaves the queue with it.
"""

from __future__ import annotations

import secrets

from orchestrator.ledger import EpisodeRow, Ledger
from orchestrator.queue import JobQueue
from orchestrator.records import Receipt
from orchestrator.vocabulary import Outcome

_TAKEN_SECONDS = 30.0
"""Lease of who ends it: far longer than the receipt takes."""

_DETAILS = {
    Outcome.CANCELLED: "cancelled before it was taken",
    Outcome.TRAINER_LOST: "its trainer sent no heartbeat any more before it was taken",
    Outcome.WORKER_LOST: "its job was lost again and again before anybody could begin it",
}


def end_queued(ledger: Ledger, queue: JobQueue, row: EpisodeRow, outcome: Outcome) -> bool:
    """End a queued episode here and now: nothing of it was ever allocated.

    False when it was not queued any more; whoever took it ends it.
    """
    owner = f"ended-{secrets.token_hex(8)}"
    lease = ledger.take(row.episode_id, row.attempt, owner, lease_seconds=_TAKEN_SECONDS)
    if lease is None:
        return False
    ledger.commit(unrun_receipt(row, outcome, _DETAILS[outcome], ledger.now()), lease.token)
    queue.withdraw(row.job_id, lost=outcome is Outcome.WORKER_LOST)
    return True


def unrun_receipt(
    row: EpisodeRow, outcome: Outcome, detail: str, finished_at: float, allocations: tuple[str, ...] = ()
) -> Receipt:
    """The receipt of an episode that ends without anybody having run it to its end."""
    return Receipt(
        episode_id=row.episode_id,
        attempt=row.attempt,
        run_id=row.spec.run_id,
        group_id=row.spec.group_id,
        task_id=row.spec.task.id,
        task_digest=row.spec.task.digest(),
        template=row.spec.template,
        drive=row.spec.drive,
        outcome=outcome,
        reward=None,
        detail=detail,
        queued_at=row.queued_at,
        started_at=row.started_at,
        finished_at=finished_at,
        allocations=allocations,
    )
