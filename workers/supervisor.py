"""A worker process: one supervisor with its Terminus server and two slots, all forked from it.

What always holds: everything heavy is imported before the first fork and nothing has made a request then, so that an
episode starts in milliseconds and idle workers share their memory; the server's listening socket belongs to the
supervisor, so a restarted server keeps its address; a child that dies is replaced, and what it was running is aborted
by the loss of its lease, never scored.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

from redis.exceptions import RedisError

from orchestrator.connection import client
from orchestrator.farm import open_farm
from orchestrator.presence import Presence, WorkerRow
from orchestrator.provider import Provider
from orchestrator.scripts import preload
from orchestrator.settings import Budgets, Settings
from workers.jobs import SlotContext
from workers.parentage import die_with_parent, leave_terminal_signals_to_parent
from workers.preflight import require_accepted_key
from workers.slot import run_slot
from workers.terminus.client import TerminusSession
from workers.terminus.server import serve

logger = logging.getLogger(__name__)

SLOTS = 2
"""Slots of one worker: the sessions of one Terminus server."""

_POLL_SECONDS = 0.05
_RESTART_SECONDS = (0.2, 5.0)
"""First and longest pause before a child that died is started again."""


@dataclass
class _Child:
    """One kind of child and its present process."""

    name: str
    main: Callable[[int], None]
    pid: int = 0
    starts: int = 0
    restart_at: float = 0.0
    pause: float = _RESTART_SECONDS[0]
    started: float = field(default_factory=time.monotonic)


class Supervisor:
    """Runs a worker until it is told to stop: SIGTERM or SIGINT drains, a second one closes what still runs."""

    def __init__(self, settings: Settings, worker_id: str, make_provider: Callable[[], Provider]) -> None:
        if settings.redis_url is None:
            raise ValueError("a worker needs settings with a redis_url")
        self._settings = settings
        self._worker_id = worker_id
        self._make_provider = make_provider
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = _Child("terminus", self._serve_terminus)
        self._slots = [_Child(f"{worker_id}-{n}", self._slot_main(n)) for n in range(1, SLOTS + 1)]
        self._signals = 0
        self._redis_away = False
        self._presence = Presence(
            client(settings.redis_url),
            slot_seconds=settings.lease_lost_seconds,
            trainer_seconds=settings.trainer_lost_seconds,
        )

    def run(self) -> None:
        """Start the children, keep them alive, drain when told to. Returns when all of them have ended.

        Raises AuthenticationFailed before anything is started when the provider refuses the key.
        """
        require_accepted_key(self._make_provider)
        preload()
        gc.collect()
        gc.freeze()  # forked children share these pages until something writes to them
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        next_beat = 0.0
        for child in (self._server, *self._slots):
            self._start(child)
        while not self._signals:
            self._reap(restart=True)
            if time.monotonic() >= next_beat:
                self._beat("running")
                next_beat = time.monotonic() + self._settings.lease_renew_seconds
            time.sleep(_POLL_SECONDS)
        self._drain()

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
                self._signal(self._slots, limits.pop(0)[1])
            self._reap(restart=False, keep=self._server)
            if now >= next_beat and not self._redis_away:  # each try would hold the drain up for ten seconds
                self._beat("draining")
                next_beat = now + settings.lease_renew_seconds
            time.sleep(_POLL_SECONDS)
        self._signal([self._server], signal.SIGTERM)
        ends = time.monotonic() + settings.budgets.message_seconds
        while self._server.pid and time.monotonic() < ends:
            self._reap(restart=False)
            time.sleep(_POLL_SECONDS)
        self._signal([self._server], signal.SIGKILL)
        self._listener.close()
        if self._redis_away:
            return
        try:
            self._presence.remove_worker(self._worker_id, [slot.name for slot in self._slots])
        except RedisError as error:
            logger.warning("departure not noted: %s", error)

    def _start(self, child: _Child) -> None:
        supervisor = os.getpid()
        child.starts += 1
        child.started = time.monotonic()
        child.pid = os.fork()
        if child.pid == 0:
            code = 1
            try:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                die_with_parent(supervisor)
                leave_terminal_signals_to_parent()
                child.main(child.starts)
                code = 0
            except Exception:
                logger.exception("%s failed", child.name)
            finally:
                os._exit(code)

    def _reap(self, *, restart: bool, keep: _Child | None = None) -> None:
        """Note children that have ended; start again those that shall live."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                break
            for child in (self._server, *self._slots):
                if child.pid == pid:
                    self._note_end(child, status, expected=not restart and child is not keep)
        for child in (self._server, *self._slots):
            wanted = restart or child is keep
            if wanted and child.pid == 0 and time.monotonic() >= child.restart_at:
                self._start(child)

    def _note_end(self, child: _Child, status: int, *, expected: bool) -> None:
        lived = time.monotonic() - child.started
        child.pid = 0
        child.pause = _RESTART_SECONDS[0] if lived > 30 else min(child.pause * 2, _RESTART_SECONDS[1])
        child.restart_at = time.monotonic() + child.pause
        if not expected:
            logger.error("%s ended with status %s after %.1f s; it is started again", child.name, status, lived)

    def _beat(self, state: str) -> None:
        alive = [slot.name for slot in self._slots if slot.pid] if state == "running" else []
        row = WorkerRow(self._worker_id, socket.gethostname(), os.getpid(), state, SLOTS, self._url)
        try:
            self._presence.beat_worker(row, alive)
            self._redis_away = False
        except RedisError as error:
            self._redis_away = True
            logger.warning("heartbeat not sent: %s", error)

    def _serve_terminus(self, start: int) -> None:
        serve(self._make_provider(), self._settings.budgets, listener=self._listener, max_sessions=SLOTS)

    def _slot_main(self, number: int) -> Callable[[int], None]:
        def main(start: int) -> None:
            self._listener.close()
            name = f"{self._worker_id}-{number}" + (f"-{start}" if start > 1 else "")  # RQ refuses a live name twice
            run_slot(
                SlotContext(
                    self._settings,
                    self._worker_id,
                    name,
                    open_farm(self._settings),
                    self._make_provider(),
                    self._session,
                ),
                os.getppid(),
            )

        return main

    def _session(self, budgets: Budgets) -> TerminusSession:
        return TerminusSession(self._url, budgets)

    def _signal(self, children: list[_Child], number: signal.Signals) -> None:
        for child in children:
            if child.pid:
                os.kill(child.pid, number)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._signals += 1
