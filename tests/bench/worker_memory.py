"""What each further idle worker costs a host in memory.

Everything that this process started is added up (PSS), with one worker, then two, then three: pages that a new worker
shares with what was there already are counted once.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from tests.bench.memory import pss_mb, tree_of
from tests.bench.rows import Goal, Row
from tests.bench.stand import farm_of, one_more_worker

_SETTLE_SECONDS = 4.0
"""A beat or two, so that a new worker has done all that an idle one does."""


def worker_memory() -> list[Row]:
    """Rows for the second and the third worker."""
    with farm_of(1) as farm, ExitStack() as more:
        totals = [_total_mb()]
        for _ in range(2):
            more.enter_context(one_more_worker(farm, "deploy.cli", "worker"))
            totals.append(_total_mb())
    second, third = totals[1] - totals[0], totals[2] - totals[1]
    return [
        Row(
            "each further idle worker, PSS",
            max(second, third),
            "MB",
            Goal("<=", 120),
            f"the larger of the second ({second:.1f}) and the third ({third:.1f}); server and two slots each",
        ),
    ]


def _total_mb() -> float:
    time.sleep(_SETTLE_SECONDS)
    return pss_mb(tree_of(os.getpid()))
