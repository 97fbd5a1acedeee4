"""The spare horse: one order or none, warm when its slot is idle, gone with its slot."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from workers.spare import Order, SpareHorse


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where the forked processes write what they do."""
    path = tmp_path / "notes"
    path.touch()
    return path


def _spare(notes: Path) -> SpareHorse:
    def note(text: str) -> None:
        with notes.open("a") as stream:
            stream.write(text + "\n")

    return SpareHorse(lambda: note("warm"), lambda order: note(f"{order.job_id} {order.execution_id}"))


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_idle_spare_warms_up_and_then_runs_its_one_order(notes: Path) -> None:
    spare = _spare(notes)
    wait_until(lambda: notes.read_text() == "warm\n", description="it is warm")
    assert spare.start(Order("e-1-a1", "x-1"))
    assert os.waitpid(spare.pid, 0)[1] == 0
    assert notes.read_text() == "warm\ne-1-a1 x-1\n"


def test_a_spare_that_is_wanted_at_once_does_not_warm_up_first(notes: Path) -> None:
    spare = _spare(notes)
    assert spare.start(Order("e-1-a1", "x-1"))
    assert os.waitpid(spare.pid, 0)[1] == 0
    assert notes.read_text() == "e-1-a1 x-1\n"


def test_a_spare_that_is_dismissed_is_gone_at_once(notes: Path) -> None:
    spare = _spare(notes)
    _spare(notes).dismiss()  # it has a copy of the first one's pipe
    spare.dismiss()
    assert _gone(spare.pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(spare.pid, 0)


def test_a_dead_spare_says_so_and_is_reaped(notes: Path) -> None:
    spare = _spare(notes)
    os.kill(spare.pid, signal.SIGKILL)
    wait_until(lambda: _gone(spare.pid), description="it is dead")
    assert not spare.start(Order("e-1-a1", "x-1"))
    with pytest.raises(ChildProcessError):
        os.waitpid(spare.pid, 0)
    assert notes.read_text() in ("", "warm\n")


def test_a_spare_ends_with_its_slot(notes: Path) -> None:
    reader, writer = os.pipe()
    slot = os.fork()
    if slot == 0:
        os.write(writer, str(_spare(notes).pid).encode())
        time.sleep(60)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as told:
        pid = int(told.read(20))
    os.kill(slot, signal.SIGKILL)
    os.waitpid(slot, 0)
    wait_until(lambda: _gone(pid), description="the spare is gone too")
