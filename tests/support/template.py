"""What every warm process is forked from: a process that has imported the modules it was told, and does nothing else.

`python -m tests.support.template FD MODULE...` imports the modules and then starts what it is asked for over the socket
FD, until that is closed. Always holds: it has one thread, so that a fork leaves nothing behind that was held; it reaps
what it has started and never runs a command itself. A forked process ends as `python -m` does: by leaving the module.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module

MARK = "TEST_OF_FARM_MARK"
MARK_LENGTH = 32
REQUEST_BYTES = 1 << 17
"""A command line and an environment: ten times what ours take."""


@dataclass(frozen=True)
class Request:
    """A process to start as `python -m module arguments`; the descriptors of its standard streams come beside."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str


def main(descriptor: int, modules: Sequence[str]) -> Request | None:
    """Serve until nobody can ask any more; in a forked process, what it shall become."""
    for name in modules:
        import_module(name)
    assert threading.active_count() == 1, f"a module has started threads: {threading.enumerate()}"
    gc.freeze()  # what is here stays: the forked need not copy it to look through it
    with socket.socket(fileno=descriptor) as asked:
        while True:
            body, descriptors, _, _ = socket.recv_fds(asked, REQUEST_BYTES, 4)
            if not body:
                return None
            if os.fork() == 0:
                break
            for one in descriptors:
                os.close(one)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    *streams, told = descriptors
    _keep(told)
    os.close(told)
    request = Request(**json.loads(body))
    _become(request, streams)
    return request


def _keep(told: int) -> None:
    """Fork once more, tell the child's pid and then its end, and exit; returns in the child only."""
    if (pid := os.fork()) == 0:
        os.setsid()
        return
    with open(told, "w", buffering=1) as answer:
        answer.write(f"{pid}\n")
        answer.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
    os._exit(0)


def _become(request: Request, streams: Sequence[int]) -> None:
    """Take the place, the environment and the standard streams that a process started for this would have."""
    for number, one in enumerate(streams):
        os.dup2(one, number)
        os.close(one)
    _show_mark(request.environment.get(MARK, ""))
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    sys.path[0] = request.cwd
    sys.argv[1:] = request.arguments
    sys.stdout.reconfigure(write_through=bool(request.environment.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]


def _show_mark(mark: str) -> None:
    """Write the mark where the kernel reads a process's environment: in the memory that this one was started with."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memmove(getenv(MARK.encode()), mark.ljust(MARK_LENGTH, "-").encode(), MARK_LENGTH)


def body_of(request: Request) -> bytes:
    """A request as it is sent."""
    body = json.dumps(asdict(request)).encode()
    assert len(body) < REQUEST_BYTES, "the command line and its environment are too long"
    return body


if __name__ == "__main__":
    become = main(int(sys.argv[1]), sys.argv[2:])
    if become is not None:
        runpy.run_module(become.module, run_name="__main__", alter_sys=True)
