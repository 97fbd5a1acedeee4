"""Processes that spend money as workers do until a budget stops them or they are killed: `python -m ... URL RUN COUNT`.

Forked from one that has imported everything. Each takes episodes one after another: permit, two sandboxes that lived
for some random part of their longest life, and a receipt; then it writes its pid, so that a test knows who it is and
that it is in the middle of things. The first process ends when all have.
"""

from __future__ import annotations

import os
import random
import sys
import time

from orchestrator.farm import Farm
from orchestrator.limiter import PermitAnswer
from orchestrator.records import EpisodeSpec
from orchestrator.rows import Lease
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import a_receipt, a_spec, intended, leased, opened_farm

CONCURRENCY = 12
"""More than there are processes: money is what they contend for."""


def main() -> None:
    url, run_id, count = sys.argv[1:]
    children = []
    for seed in range(int(count)):
        pid = os.fork()
        if pid == 0:
            spend(url, run_id, random.Random(seed))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def spend(url: str, run_id: str, dice: random.Random) -> None:
    """One process's episodes."""
    with opened_farm(url, concurrency_limit=CONCURRENCY) as farm:
        while True:
            spec, lease = leased(farm, a_spec(run_id=run_id), lease_seconds=600)
            while (answer := farm.limiter.ask(spec.episode_id, reservation_id=None)) is PermitAnswer.STEP_BACK:
                time.sleep(0.02)  # what is left is reserved for the others; a worker leaves its slot to them for longer
            if answer is not PermitAnswer.GRANTED:
                farm.ledger.commit(a_receipt(spec, Outcome.BUDGET_EXHAUSTED), lease.token)
                return
            live(farm, spec, lease, dice)
            os.write(1, f"{os.getpid()}\n".encode())


def live(farm: Farm, spec: EpisodeSpec, lease: Lease, dice: random.Random) -> None:
    """An episode's two sandboxes, one after the other, and its receipt."""
    allocations = farm.ledger.allocations
    for role in Role:
        longest = spec.budgets.longest_seconds(role)
        row = intended(farm, spec, lease, role, longest_seconds=longest)
        allocations.created(row, f"sbx-{row.allocation_id}", lease.token, creating_ms=0)
        row = allocations.sized(row, vcpus=2, memory_mb=512).row
        lived = dice.choice([dice.random(), 1.0, 2.0])  # a host that comes back late says more than it can have been
        allocations.absent(row, lease.token, running_ms=int(1000 * longest * lived))
    names = farm.ledger.allocation_ids(spec.episode_id)
    farm.ledger.commit(a_receipt(spec, Outcome.SOLVED, allocations=names), lease.token)


if __name__ == "__main__":
    main()
