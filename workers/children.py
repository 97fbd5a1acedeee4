"""Forked children that are kept alive: started, noticed when they die, started again with growing pauses.

What always holds: a child dies with its parent, has default signal handlers and its own process group; it is started
again only while the parent wants it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from workers.parentage import fork_child

logger = logging.getLogger(__name__)

_RESTART_SECONDS = (0.2, 5.0)
"""First and longest pause before a child that died is started again."""

_PROVEN_SECONDS = 30.0
"""A child that lived this long died of something new: its next pause is the first one again."""


@dataclass(eq=False)
class Child:
    """One kind of child and its present process; `main` is told which start this is, from 1."""

    name: str
    main: Callable[[int], None]
    pid: int = 0
    starts: int = 0
    restart_at: float = 0.0
    pause: float = _RESTART_SECONDS[0]
    started: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Fork and run `main` in the child, which never returns from here."""
        self.starts += 1
        self.started = time.monotonic()
        self.pid = fork_child(lambda: self.main(self.starts), self.name)

    def send(self, number: signal.Signals) -> None:
        """Signal its present process, if it has one."""
        if self.pid:
            os.kill(self.pid, number)  # not reaped by anybody else: at worst it is a zombie of ours


def reap(children: Iterable[Child], *, keep: Iterable[Child] = ()) -> None:
    """Note which children have ended, and start those of `keep` again when their pause is over."""
    kept = list(keep)
    by_pid = {child.pid: child for child in children if child.pid}
    while by_pid:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if (child := by_pid.pop(pid, None)) is not None:
            _note_end(child, status, expected=child not in kept)
    for child in kept:
        if child.pid == 0 and time.monotonic() >= child.restart_at:
            try:
                child.start()
            except OSError as error:  # no more processes just now: the others go on, and it is tried again
                logger.error("%s could not be started: %s", child.name, error)
                _postpone(child, 0.0)


def _postpone(child: Child, lived: float) -> None:
    child.pause = _RESTART_SECONDS[0] if lived > _PROVEN_SECONDS else min(child.pause * 2, _RESTART_SECONDS[1])
    child.restart_at = time.monotonic() + child.pause


def _note_end(child: Child, status: int, *, expected: bool) -> None:
    lived = time.monotonic() - child.started
    child.pid = 0
    _postpone(child, lived)
    if not expected:
        logger.error("%s ended with status %s after %.1f s; it is started again", child.name, status, lived)
