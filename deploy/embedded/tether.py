"""A child's leash: the process that starts it takes it along when it dies, also by SIGKILL. Linux only.

As a script, `tether.py PARENT_PID PROGRAM ARGS...` puts itself on the leash and becomes PROGRAM. A preexec_fn would do
the same between fork and exec, which is not safe once the parent has threads.

The kernel watches the parent's *thread*: whoever starts a child must do it from a thread that lives as long as the
child shall.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tether(parent_pid: int) -> None:
    """Ask for SIGTERM on the parent's death; exit at once when that already happened."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        sys.exit("the parent process is gone")


if __name__ == "__main__":
    tether(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
