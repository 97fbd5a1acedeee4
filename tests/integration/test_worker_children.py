"""Forked children: no stop signal is lost around a fork, and what dies is started again with growing pauses."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.waiting import wait_until
from workers.children import Child, reap


@pytest.fixture(autouse=True)
def _noting_parent() -> Iterator[list[int]]:
    """A parent that notes its stop signals, as a supervisor does."""
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    yield noted
    signal.signal(signal.SIGTERM, before)


def test_a_stop_signal_right_after_the_fork_is_not_lost() -> None:
    for _ in range(30):
        child = Child("sleeper", lambda start: time.sleep(20))
        child.start()
        child.send(signal.SIGTERM)
        _, status = os.waitpid(child.pid, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_system_without_processes_to_give_costs_a_pause_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child("unborn", lambda start: time.sleep(20))

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refuse)
        reap([child], keep=[child])
        assert child.pid == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}

    def alive() -> bool:
        reap([child], keep=[child])
        return child.pid != 0

    wait_until(alive, description="it is started when there are processes again")
    child.send(signal.SIGKILL)
    os.waitpid(child.pid, 0)


def test_a_child_that_dies_is_started_again_until_nobody_wants_it() -> None:
    child = Child("dier", lambda start: None)
    child.start()

    def starts() -> int:
        reap([child], keep=[child])
        return child.starts

    def alive() -> bool:
        reap([child])
        return child.pid != 0

    wait_until(lambda: starts() >= 3, description="it was started again")
    wait_until(lambda: not alive(), description="it stays down")
    assert child.pause > 0.2
