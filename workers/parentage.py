"""Ties a child process to its parent: it dies when the parent does, and leaves Ctrl-C to it.

Without this, a work horse outlives its killed worker and finishes the job beside whoever took it over.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send `sig` to this process when its parent ends; exits if that has happened already.

    Linux only, and it follows the parent's *thread*: fork from the main thread.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def leave_terminal_signals_to_parent() -> None:
    """Move into a process group of our own, so that the terminal's Ctrl-C reaches the parent only."""
    os.setpgid(0, 0)
