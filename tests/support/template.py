"""What every warm process is forked from: processes that have imported the modules of their stage, and do nothing else.

`python -m tests.support.template ALIVE FD:MODULE,... FD:MODULE,...` imports one stage's modules after the other's and
leaves a fork of itself behind at each stage, so that what two stages share is imported once. A stage starts what it is
asked for at its listening socket FD, until nobody holds the other end of the pipe ALIVE. Always holds: a stage has one
thread, so that a fork leaves nothing behind that was held; it reaps what it has started and never runs a command
itself. A forked process ends as `python -m` does: by leaving the module.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module

MARK = "TEST_OF_FARM_MARK"
MARK_LENGTH = 32
REQUEST_BYTES = 1 << 17
"""A command line and an environment: ten times what ours take."""
NUMBER_BYTES = 16
"""A pid or an exit code, as it is told."""


@dataclass(frozen=True)
class Request:
    """A process to start as `python -m module arguments`; the descriptors of its standard streams come beside."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    ignore_warnings: bool = False
    own_session: bool = True


def main(alive: int, stages: Sequence[str]) -> Request | None:
    """Serve until nobody is left who can ask; in a forked process, what it shall become."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for those who run something
    descriptors = [int(stage.partition(":")[0]) for stage in stages]
    for own, stage in zip(descriptors, stages, strict=True):
        with warnings.catch_warnings(action="ignore"):
            for name in stage.partition(":")[2].split(","):
                import_module(name)
        assert threading.active_count() == 1, f"a module has started threads: {threading.enumerate()}"
        if own == descriptors[-1] or os.fork() == 0:
            for other in descriptors:
                if other != own:
                    os.close(other)
            return _serve(own, alive)
    raise AssertionError("no stages")


def _serve(descriptor: int, alive: int) -> Request | None:
    gc.freeze()  # what is here stays: the forked need not copy it to look through it
    with socket.socket(fileno=descriptor) as listening:
        while True:
            asked = alive in select.select([descriptor, alive], [], [])[0]
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if asked:
                return None
            connection = listening.accept()[0]
            if os.fork() == 0:
                break
            connection.close()
    os.close(alive)
    body, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
    if not body:
        os._exit(0)
    request = Request(**json.loads(body))
    _keep(connection, own_session=request.own_session)
    connection.close()
    _become(request, streams)
    return request


def _keep(told: socket.socket, *, own_session: bool) -> None:
    """Fork once more, tell the child's pid and then its end, and exit; returns in the child only."""
    if (pid := os.fork()) == 0:
        if own_session:
            os.setsid()
        return
    with suppress(BrokenPipeError):  # who asked has gone
        told.send(b"%d" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        told.send(b"%d" % code)
    os._exit(0)


def _become(request: Request, streams: Sequence[int]) -> None:
    """Take the place, the environment and the standard streams that a process started for this would have."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, one in enumerate(streams):
        os.dup2(one, number)
        os.close(one)
    _show_mark(request.environment.get(MARK, ""))
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    sys.path[0] = request.cwd
    sys.argv[1:] = request.arguments
    if request.ignore_warnings:
        warnings.simplefilter("ignore")
        sys.warnoptions.append("ignore")  # what it starts is told, too
    sys.stdout.reconfigure(write_through=bool(request.environment.get("PYTHONUNBUFFERED")))  # type: ignore[union-attr]


def _show_mark(mark: str) -> None:
    """Write the mark where the kernel reads a process's environment: in the memory that this one was started with."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    ctypes.memmove(getenv(MARK.encode()), mark.ljust(MARK_LENGTH, "-").encode(), MARK_LENGTH)


def ask(path: str, request: Request, streams: Sequence[int]) -> socket.socket:
    """Ask the stage that listens there; what comes back says the pid, and at the end the exit code."""
    body = json.dumps(asdict(request)).encode()
    assert len(body) < REQUEST_BYTES, "the command line and its environment are too long"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    socket.send_fds(connection, [body], streams)
    return connection


if __name__ == "__main__":
    become = main(int(sys.argv[1]), sys.argv[2:])
    if become is not None:
        sys.modules["__main__"] = types.ModuleType("__main__")  # what it spawns shall not look for this one
        runpy.run_module(become.module, run_name="__main__", alter_sys=True)
