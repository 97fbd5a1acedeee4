"""Ending an episode without running it: its receipt, and the one way in which a queued one ends.

What always holds: whoever ends a queued episode takes it first, as a slot would, so that it has one receipt whoever
else comes; its job leaves the queue with it.
"""

from __future__ import annotations

import secrets

from orchestrator.errors import FarmError
from orchestrator.ledger import Ledger
from orchestrator.queue import JobQueue
from orchestrator.records import Receipt
from orchestrator.rows import EpisodeRow
from orchestrator.vocabulary import Drive, Outcome

_TAKEN_SECONDS = 30.0
"""Lease of who ends it: far longer than the receipt takes."""

_DETAILS = {
    Outcome.ADMISSION_TIMEOUT: "no slot took it while others of its reserved batch ran: see that its workers run, "
    "and that no more was submitted than reserved",
    Outcome.CANCELLED: "cancelled before it was taken",
    Outcome.TRAINER_LOST: "its trainer sent no heartbeat any more before it was taken",
    Outcome.WORKER_LOST: "its job was lost again and again before anybody could begin it",
}


def end_queued(
    ledger: Ledger, queue: JobQueue, row: EpisodeRow, outcome: Outcome, *, detail: str | None = None
) -> bool:
    """End a queued episode here and now: nothing of it was ever allocated. `detail` instead of the outcome's usual one.

    False when it was not queued any more; whoever took it ends it.
    """
    receipt = unrun_receipt(row, outcome, detail or _DETAILS[outcome], ledger.now())  # before anything is changed
    owner = f"ended-{secrets.token_hex(8)}"
    lease = ledger.take(row.episode_id, row.attempt, owner, lease_seconds=_TAKEN_SECONDS)
    if lease is None:
        return False
    ledger.commit(receipt, lease.token)
    queue.named(row.queue).withdraw(row.job_id, lost=outcome is Outcome.WORKER_LOST)
    return True


def unrun_receipt(
    row: EpisodeRow, outcome: Outcome, detail: str, finished_at: float, allocations: tuple[str, ...] = ()
) -> Receipt:
    """The receipt of an episode that ends without anybody having run it to its end.

    A spec that this version cannot read keeps nobody waiting: then the receipt says so and is made of the plain fields.
    """
    drive = Drive.REMOTE if row.trainer_id else Drive.AUTONOMOUS
    task_id, task_digest, template = "unknown", "", ""
    try:
        spec = row.spec
    except FarmError as error:
        detail = f"{detail}; {error}"
    else:
        task_id, task_digest, template = spec.task.id, spec.task.digest(), spec.template
    return Receipt(
        episode_id=row.episode_id,
        attempt=row.attempt,
        run_id=row.run_id,
        group_id=row.group_id or None,
        task_id=task_id,
        task_digest=task_digest,
        template=template,
        drive=drive,
        outcome=outcome,
        reward=None,
        detail=detail,
        queued_at=row.queued_at,
        started_at=row.started_at,
        finished_at=finished_at,
        allocations=allocations,
    )
