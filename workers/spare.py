"""The next work horse: forked and warmed up while its slot is idle, so that a job does not wait for either.

A fresh fork pays for every page it first writes to, for its connections and for the SDK's runtime: about 60 ms of an
episode. What always holds: a spare is forked from a slot that has made no provider request, like any horse; it dies
with its slot; it runs at most one order, and none when its slot lets go of it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass

from workers.parentage import fork_child

logger = logging.getLogger(__name__)

_WARM_UP_AFTER_SECONDS = 0.05
"""A slot that gets its next job sooner than this is busy: then warming up only costs processor time."""


@dataclass(frozen=True)
class Order:
    """What a spare is told: which job to run, under which of RQ's executions."""

    job_id: str
    execution_id: str


class SpareHorse:
    """A process that waits for one order; made and used by its slot only."""

    def __init__(self, warm: Callable[[], None], run: Callable[[Order], None]) -> None:
        reader, self._writer = os.pipe()

        def stand_by() -> None:
            os.close(self._writer)
            _stand_by(reader, warm, run)

        self.pid = fork_child(stand_by, "spare horse")
        os.close(reader)

    def start(self, order: Order) -> bool:
        """Hand over the order; False when the spare is dead, and then reaped."""
        ended, _ = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            os.close(self._writer)
            return False
        try:
            os.write(self._writer, json.dumps([order.job_id, order.execution_id]).encode())  # a pipe holds far more
        except BrokenPipeError:
            os.waitpid(self.pid, 0)
            return False
        finally:
            os.close(self._writer)
        return True

    def dismiss(self) -> None:
        """End it: there will be no order."""
        os.close(self._writer)
        os.kill(self.pid, signal.SIGKILL)  # not by the closed pipe alone: who was forked since has a copy of it
        os.waitpid(self.pid, 0)


def _stand_by(reader: int, warm: Callable[[], None], run: Callable[[Order], None]) -> None:
    ready, _, _ = select.select([reader], [], [], _WARM_UP_AFTER_SECONDS)
    if not ready:
        warm()
    with os.fdopen(reader, "rb") as orders:
        text = orders.read()
    if text:  # otherwise the slot is gone
        run(Order(*json.loads(text)))
