"""Several workers of one host, forked from one process that imported everything once: they share that memory.

What always holds: each is a whole worker with its own supervisor and id; one that dies is started again, under a new
id, since the old one's slots may still be listed; a signal reaches all of them, and the crew ends when all have.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from types import FrameType

from orchestrator.provider import Provider
from orchestrator.scripts import preload
from orchestrator.settings import Settings
from workers.children import Child, reap
from workers.preflight import require_accepted_key
from workers.supervisor import Supervisor

_POLL_SECONDS = 0.05


def run_crew(settings: Settings, name: str, count: int, make_provider: Callable[[], Provider]) -> None:
    """Run `count` workers until a signal says stop and all have drained; a single one runs in this process.

    Raises AuthenticationFailed before anything is started when the provider refuses the key.
    """
    require_accepted_key(make_provider)
    preload()
    gc.collect()
    gc.freeze()  # forked children share these pages until something writes to them
    if count == 1:
        Supervisor(settings, name, make_provider).run()
        return
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    workers = [Child(f"{name}-{n}", _main(settings, f"{name}-{n}", make_provider)) for n in range(1, count + 1)]
    for worker in workers:
        worker.start()
    passed_on = 0
    while any(worker.pid for worker in workers) or not received:
        reap(workers, keep=() if received else workers)
        while passed_on < len(received):
            passed_on += 1
            for worker in workers:
                worker.send(signal.SIGTERM)
        time.sleep(_POLL_SECONDS)


def _main(settings: Settings, name: str, make_provider: Callable[[], Provider]) -> Callable[[int], None]:
    def main(start: int) -> None:
        Supervisor(settings, name if start == 1 else f"{name}-{start}", make_provider).run()

    return main
