"""The sandbox's commands: started by one call, watched by any number, outliving every connection.

Output is held back at its source: while any watcher's response is congested the process is not read, so neither the
agent nor the host ever holds more than a few chunks. With no watcher it is read and dropped, so that the process
never hangs on a full pipe.
"""

from __future__ import annotations

import os
import signal

from .http import Failure
from .loop import READ, WRITE, Loop

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class Watcher(Protocol):
        """Who is shown a process's output."""

        @property
        def congested(self) -> bool: ...

        def output(self, channel: str, chunk: bytes) -> None: ...

        def ended(self, status: int) -> None: ...


_CHUNK_BYTES = 32_768
_PIPE_BYTES = 65_536  # what a pipe holds by default


class Process:
    """One started command: its descriptors, its watchers, and its wait status once it has ended."""

    def __init__(
        self,
        loop: Loop,
        pid: int,
        description: dict[str, Any],
        outputs: dict[int, str],
        stdin: int | None,
        ended: Callable[[Process], None],
    ) -> None:
        self.pid = pid
        self.description = description
        self.watchers: list[Watcher] = []
        self.terminal = next((fd for fd, channel in outputs.items() if channel == "pty"), None)
        self._loop = loop
        self._outputs = outputs
        self._stdin = stdin
        self._pending = bytearray()
        self._on_written: list[Callable[[], None]] = []
        self._closing_stdin = False
        self._status: int | None = None
        self._killed = False
        self.running = True
        self._ended = ended
        for fd in (*outputs, *(() if stdin is None else (stdin,))):
            os.set_blocking(fd, False)

    def signal(self, number: int) -> None:
        """Signal the leader only; its descendants end with the sandbox."""
        if not self.running:
            return
        if self._status is None:
            os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._killed = True
            self._settle()

    def exited(self, status: int) -> None:
        self._status = status
        self._settle()

    def resume(self) -> None:
        """Watch the outputs again, unless a watcher is (still) congested."""
        events = 0 if any(watcher.congested for watcher in self.watchers) else READ
        for fd in self._outputs:
            self._loop.watch(fd, events | self._writing(fd), lambda ready, fd=fd: self._ready(fd, ready))  # type: ignore[misc]

    def feed(self, data: bytes, written: Callable[[], None]) -> None:
        """Write to the command's input, and call back when it has all been taken."""
        if self._stdin is None or self._closing_stdin:
            raise Failure(500, "internal", "stdin not enabled or closed")
        self._pending += data
        self._on_written.append(written)
        self._write_input()

    def close_input(self) -> None:
        self._closing_stdin = True
        if not self._pending:
            self._drop_input()

    def _writing(self, fd: int) -> int:
        return WRITE if fd == self._stdin and self._pending else 0

    def _ready(self, fd: int, events: int) -> None:
        if events & WRITE and fd == self._stdin:
            self._write_input()
        if events & READ and fd in self._outputs:
            self._read(fd)

    def _read(self, fd: int) -> bool:
        """Pass one chunk on; whether there was any."""
        try:
            chunk = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose last process has gone reads as EIO
            chunk = b""
        channel = self._outputs[fd]
        if not chunk:
            self._close_output(fd)
            self._settle()
            return False
        for watcher in list(self.watchers):
            watcher.output(channel, chunk)
        if any(watcher.congested for watcher in self.watchers):
            self.resume()
        return True

    def _write_input(self) -> None:
        if self._stdin is None:
            return
        try:
            while self._pending:
                del self._pending[: os.write(self._stdin, self._pending)]
        except BlockingIOError:
            pass
        except OSError:  # the command closed its end: what it does not want is dropped, as by a real pipe's reader
            self._drop_input()
            return
        if self._stdin in self._outputs:
            self.resume()
        else:
            self._loop.watch(self._stdin, WRITE if self._pending else 0, lambda _: self._write_input())
        if not self._pending:
            self._tell_written()
            if self._closing_stdin:
                self._drop_input()

    def _tell_written(self) -> None:
        callbacks, self._on_written = self._on_written, []
        for callback in callbacks:
            callback()

    def _drop_input(self) -> None:
        fd, self._stdin = self._stdin, None
        self._pending.clear()
        if fd is not None and fd not in self._outputs:
            self._loop.watch(fd, 0, lambda _: None)
            os.close(fd)
        self._tell_written()

    def _close_output(self, fd: int) -> None:
        self._loop.watch(fd, 0, lambda _: None)
        del self._outputs[fd]
        if self._stdin == fd:
            self._stdin = None
        os.close(fd)

    def _settle(self) -> None:
        """Announce the end: after a kill at once, otherwise once no one holds the outputs any more."""
        if self._status is None or (self._outputs and not self._killed):
            return
        status, self._status = self._status, None
        self.running = False
        for fd in list(self._outputs):
            # What was printed before a kill still counts; a descendant may go on printing for ever.
            for _ in range(_PIPE_BYTES // _CHUNK_BYTES):
                if fd not in self._outputs or not self._read(fd):
                    break
        for fd in list(self._outputs):
            self._close_output(fd)
        self._drop_input()
        self._ended(self)
        for watcher in list(self.watchers):
            watcher.ended(status)
        self.watchers.clear()
