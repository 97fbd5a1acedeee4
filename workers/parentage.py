"""Forks, and ties a child process to its parent: it dies when the parent does, and leaves Ctrl-C to it.

Without the tie, a work horse outlives its killed worker and finishes the job beside whoever took it over.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from collections.abc import Callable

logger = logging.getLogger(__name__)

_STOPS = (signal.SIGTERM, signal.SIGINT)

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send `sig` to this process when its parent ends; exits if that has happened already.

    Linux only, and it follows the parent's *thread*: fork from the main thread.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def fork_child(main: Callable[[], None], name: str) -> int:
    """Fork a child that runs `main` and ends; the child's pid. It dies with us and never returns from here.

    It has default handlers of the stop signals and a process group of its own: the terminal's Ctrl-C reaches us only.
    Raises OSError when this system has no more processes to give.
    """
    parent = os.getpid()
    # A signal between the fork and the child's own handlers would be noted by a copy of ours, and lost; and what our
    # handler raises inside Python's own fork hooks would be swallowed.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        raise
    if pid == 0:
        code = 1
        try:
            for number in _STOPS:
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            die_with_parent(parent)
            main()
            code = 0
        except Exception:
            logger.exception("%s failed", name)
        finally:
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    return pid
