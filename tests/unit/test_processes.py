"""Finding what a process left behind: descendants are known by number and start, and looked for after their end."""

from __future__ import annotations

import subprocess
import sys

from tests.support.processes import children, descendants, is_alive
from tests.support.waiting import wait_until


def test_a_grandchild_that_outlives_its_parent_is_still_known() -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']).wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        (grandchild,) = wait_until(lambda: children(parent.pid), description="a grandchild")
        seen = descendants(parent.pid)
        assert {pid for pid, _ in seen} == {parent.pid, grandchild}
        parent.kill()
        parent.wait()
        assert [pid for pid, started in seen if is_alive((pid, started))] == [grandchild]
        assert not is_alive((grandchild, -1)), "the same number at another time is another process"
        assert parent.stdin is not None
        parent.stdin.close()  # the grandchild's input ends
        wait_until(lambda: not any(is_alive(one) for one in seen), description="both are gone")
