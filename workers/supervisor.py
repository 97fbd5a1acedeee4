"""A worker: one supervisor with its Terminus server and two slots, all forked from it.

What always holds: everything heavy is imported before the first fork and nothing has made a request then, so that an
episode starts in milliseconds; the server's listening socket belongs to the supervisor, so a restarted server keeps its
address; a child that dies is replaced, and what it was running is aborted by the loss of its lease, never scored; a
server that lives and answers nothing is killed, and so replaced.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from itertools import count
from types import FrameType

from redis.exceptions import RedisError

from orchestrator.farm import open_farm
from orchestrator.listener import base_url, listen
from orchestrator.presence import WorkerRow, slot_name
from orchestrator.provider import Provider
from orchestrator.settings import Budgets, Settings
from orchestrator.vocabulary import SLOTS_PER_WORKER
from workers.children import Child, reap
from workers.jobs import SlotContext
from workers.liveness import Liveness
from workers.slot import free_name, run_slot
from workers.terminus.client import TerminusSession
from workers.terminus.server import serve

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class Supervisor:
    """Runs a worker until it is told to stop: SIGTERM or SIGINT drains, a second one closes what still runs."""

    def __init__(self, settings: Settings, worker_id: str, make_provider: Callable[[], Provider]) -> None:
        if settings.redis_url is None:
            raise ValueError("a worker needs settings with a redis_url")
        self._settings = settings
        self._worker_id = worker_id
        self._make_provider = make_provider
        self._listener = listen("127.0.0.1", 0)
        self._url = base_url(self._listener)
        self._liveness = Liveness(self._listener.getsockname()[:2], patience_seconds=settings.terminus_hung_seconds)
        self._server = Child("terminus", self._serve_terminus)
        self._slots = [Child(slot_name(worker_id, n), self._slot_main(n)) for n in range(1, SLOTS_PER_WORKER + 1)]
        self._signals = 0
        self._redis_away = False
        self._presence = open_farm(settings, patient=False).presence  # a beat that fails is followed by another

    def run(self) -> None:
        """Start the children, keep them alive, drain when told to. Returns when all of them have ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        next_beat = 0.0
        children = (self._server, *self._slots)
        for child in children:
            child.start()
        while not self._signals:
            reap(children, keep=children)
            self._see_to_the_server()
            if time.monotonic() >= next_beat:
                self._beat("running")
                next_beat = time.monotonic() + self._settings.lease_renew_seconds
            time.sleep(_POLL_SECONDS)
        self._drain()

    def _see_to_the_server(self) -> None:
        if not self._server.pid:
            self._liveness.forget()
        elif not self._liveness.look(time.monotonic()):
            logger.error("the Terminus server answered nothing for %g s: killed", self._settings.terminus_hung_seconds)
            self._server.send(signal.SIGKILL)
            self._liveness.forget()

    def _drain(self) -> None:
        """Slots finish what they run; past the drain time they close it; past the clean-up time they are killed."""
        settings = self._settings
        began = time.monotonic()
        limits = [
            (0.0, signal.SIGTERM),
            (settings.drain_seconds, signal.SIGTERM),
            (settings.drain_seconds + settings.budgets.cleanup_seconds, signal.SIGKILL),
        ]
        next_beat = 0.0
        while any(child.pid for child in self._slots):
            now = time.monotonic()
            if self._signals > 1 and len(limits) == 2:  # asked twice: do not wait for the drain time
                limits[0] = (0.0, signal.SIGTERM)
            while limits and now - began >= limits[0][0]:
                number = limits.pop(0)[1]
                for slot in self._slots:
                    slot.send(number)
            reap((self._server, *self._slots), keep=(self._server,))
            if now >= next_beat and not self._redis_away:  # each try would hold the drain up for ten seconds
                self._beat("draining")
                next_beat = now + settings.lease_renew_seconds
            time.sleep(_POLL_SECONDS)
        self._server.send(signal.SIGTERM)
        ends = time.monotonic() + settings.budgets.message_seconds
        while self._server.pid and time.monotonic() < ends:
            reap((self._server,))
            time.sleep(_POLL_SECONDS)
        self._server.send(signal.SIGKILL)
        self._listener.close()
        if self._redis_away:
            return
        try:
            self._presence.remove_worker(self._worker_id, [slot.name for slot in self._slots])
        except RedisError as error:
            logger.warning("departure not noted: %s", error)

    def _beat(self, state: str) -> None:
        alive = [slot.name for slot in self._slots if slot.pid] if state == "running" else []
        host, queue = socket.gethostname(), self._settings.queue
        row = WorkerRow(self._worker_id, host, os.getpid(), state, SLOTS_PER_WORKER, self._url, queue)
        try:
            self._presence.beat_worker(row, alive)
            self._redis_away = False
        except RedisError as error:
            self._redis_away = True
            logger.warning("heartbeat not sent: %s", error)

    def _serve_terminus(self, start: int) -> None:
        self._liveness.forget()
        serve(self._make_provider(), self._settings.budgets, listener=self._listener, max_sessions=SLOTS_PER_WORKER)

    def _slot_main(self, number: int) -> Callable[[int], None]:
        def main(start: int) -> None:
            self._listener.close()
            self._liveness.forget()
            name = free_name(self._settings, (slot_name(self._worker_id, number, n) for n in count(start)))
            run_slot(
                SlotContext(
                    self._settings,
                    self._worker_id,
                    name,
                    open_farm(self._settings),
                    self._make_provider(),
                    self._session,
                )
            )

        return main

    def _session(self, budgets: Budgets) -> TerminusSession:
        return TerminusSession(self._url, budgets)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._signals += 1
