"""Starts the agent: take what the host says, set the limits, then serve the connections it passes in."""

# Importing pathlib would cost every sandbox 8 ms of start.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import array
import json
import os
import resource
import signal
import socket

from . import commands, entries, files, streams
from .http import Connection, Exchange, Failure, collect
from .loop import READ, Loop

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .http import Handler


class ShortCall:
    """A call whose request is one JSON body."""

    def __init__(self, exchange: Exchange, agent: Agent) -> None:
        self._exchange = exchange
        self._agent = agent
        self._body = bytearray()

    def data(self, chunk: bytes) -> None:
        collect(self._body, chunk)

    def end(self) -> None:
        exchange, request = self._exchange, json.loads(self._body or b"{}")
        if exchange.path == "/health":
            exchange.respond(204)
        elif exchange.path.startswith("/process.Process/"):
            commands.answer(exchange, self._agent.processes, exchange.path.rpartition("/")[2], request)
        elif exchange.path.startswith("/filesystem.Filesystem/"):
            entries.answer(exchange, exchange.path.rpartition("/")[2], request)
        else:
            raise Failure(404, "unimplemented", f"no such call: {exchange.path}")

    def closed(self) -> None:
        """Nothing is held."""


class Agent:
    """Serves every connection that arrives over the host's control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self.loop = Loop()
        start = self._receive_start()
        self.processes = commands.Processes(self.loop, start["environment"])
        _limit(start["limits"])

    def serve(self) -> None:
        told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        self.loop.watch(told, READ, lambda _: self._reap(told))
        self.loop.watch(self._control.fileno(), READ, lambda _: self._accept())
        self._control.sendall(b"r")
        # From here on nothing reads what the agent would print.
        null = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, 2)
        self.loop.run()

    def route(self, exchange: Exchange) -> Handler:
        if exchange.path == "/files":
            return files.Download(exchange) if exchange.method == "GET" else files.Upload(exchange)
        if exchange.path.startswith("/process.Process/"):
            stream = streams.handler(exchange, self.processes, exchange.path.rpartition("/")[2])
            if stream:
                return stream
        return ShortCall(exchange, self)

    def _receive_start(self) -> dict[str, Any]:
        with self._control.dup() as sock, sock.makefile("rb") as stream:
            start: dict[str, Any] = json.loads(stream.readline())
        return start

    def _reap(self, told: int) -> None:
        try:
            os.read(told, 4096)
        except BlockingIOError:  # a command may have read it first, through /proc
            return
        self.processes.reap()

    def _accept(self) -> None:
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        data, ancillary, _, _ = self._control.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
        if not data:  # the host is gone
            os._exit(0)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                (fd,) = array.array("i", payload)
                Connection(self.loop, socket.socket(fileno=fd), self.route)


def main(control_fd: int) -> None:
    # The jail's builder left host descriptors open; through /proc a command could reach the host by them.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != control_fd:
            _close(fd)
    os.set_inheritable(control_fd, False)  # noqa: FBT003
    os.umask(0o022)
    # A signal that process 1 has no handler for is dropped when it comes from inside its own namespace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Agent(socket.socket(fileno=control_fd)).serve()


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:  # the listing's own descriptor is closed already
        return


def _limit(limits: dict[str, int]) -> None:
    """Hold this process, and with it every command, to the sandbox's limits.

    Set here, inside the user namespace, the number of processes is counted for this sandbox alone.
    """
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))
    try:
        # When the host runs out of memory, a sandbox goes before anything else.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # this /proc does not offer it
        return
