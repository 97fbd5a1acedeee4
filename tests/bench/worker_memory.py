"""What each further idle worker costs a host in memory.

Everything that this process started is added up (PSS), on a farm of one worker, then two, then three, which is what
`rollout-farm worker --count N` runs: pages that workers share are counted once.
"""

from __future__ import annotations

import os
import time

from tests.bench.memory import tree_pss_mb
from tests.bench.rows import Goal, Row
from tests.bench.stand import farm_of

_SETTLE_SECONDS = 4.0
"""A beat or two, so that a new worker has done all that an idle one does."""


def worker_memory() -> list[Row]:
    """Rows for the second and the third worker."""
    totals = []
    for count in (1, 2, 3):
        with farm_of(count):
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
    return tree_pss_mb(os.getpid())
