"""The process service's calls: Start, Connect, StreamInput, and the short ones."""

# Importing pathlib would cost every sandbox 8 ms of start.
# ruff: noqa: PTH112

from __future__ import annotations

import binascii
import json
import os
import pwd
import signal
import struct

from . import paths
from .http import Exchange, Failure
from .loop import Loop
from .processes import Process
from .spawn import environment, set_size, spawn

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from .http import Handler

_SIGNALS = {"SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM}
_PING_SECONDS = 90.0


class Processes:
    """The running commands by pid."""

    def __init__(self, loop: Loop, sandbox_environment: dict[str, str]) -> None:
        self.loop = loop
        self._environment = sandbox_environment
        self._running: dict[int, Process] = {}

    def reap(self) -> None:
        """Collect every ended child; as process 1 that includes orphans nobody else waits for."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if process := self._running.get(pid):
                process.exited(status)

    def find(self, selector: dict[str, Any]) -> Process:
        pid, tag = selector.get("pid"), selector.get("tag")
        for process in self._running.values():
            if process.pid == pid or (tag and process.description.get("tag") == tag):
                return process
        raise Failure(404, "not_found", f"process with pid {pid} not found")

    def rows(self) -> list[dict[str, Any]]:
        return [{"pid": process.pid, **process.description} for process in self._running.values()]

    def start(self, user: pwd.struct_passwd, request: dict[str, Any]) -> Process:
        config = request["process"]
        cwd = paths.resolve(config.get("cwd") or user.pw_dir, user)
        if not os.path.isdir(cwd):
            raise Failure(400, "invalid_argument", f"cwd '{cwd}' does not exist")
        argv = [config["cmd"], *config.get("args", [])]
        env = environment(user, self._environment, config.get("envs") or {})
        if "pty" in request:
            pid, outputs, stdin = self._spawn_on_terminal(argv, env, cwd, request["pty"])
        else:
            pid, outputs, stdin = self._spawn_on_pipes(argv, env, cwd, wants_input=request.get("stdin", True))
        description = {"config": config, **({"tag": request["tag"]} if request.get("tag") else {})}
        process = Process(self.loop, pid, description, outputs, stdin, self._forget)
        self._running[pid] = process
        return process

    def _forget(self, process: Process) -> None:
        self._running.pop(process.pid, None)

    def _spawn_on_pipes(
        self, argv: list[str], env: dict[str, str], cwd: str, *, wants_input: bool
    ) -> tuple[int, dict[int, str], int | None]:
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        in_read, in_write = os.pipe2(os.O_CLOEXEC)
        stdin = in_write
        if not wants_input:
            os.close(in_write)
            os.close(in_read)
            in_read, stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1
        try:
            pid = spawn(argv, env, cwd, (in_read, out_write, err_write), terminal=False)
        except Failure:
            for fd in (out_read, err_read, *((stdin,) if stdin >= 0 else ())):
                os.close(fd)
            raise
        finally:
            for fd in (in_read, out_write, err_write):
                os.close(fd)
        return pid, {out_read: "stdout", err_read: "stderr"}, stdin if stdin >= 0 else None

    def _spawn_on_terminal(
        self, argv: list[str], env: dict[str, str], cwd: str, pty: dict[str, Any]
    ) -> tuple[int, dict[int, str], int | None]:
        ours, theirs = os.openpty()
        size = pty.get("size", {})
        set_size(ours, size.get("rows", 24), size.get("cols", 80))
        try:
            pid = spawn(argv, {"TERM": "xterm-256color", **env}, cwd, (theirs, theirs, theirs), terminal=True)
        except Failure:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return pid, {ours: "pty"}, ours


class EventStream:
    """The response of Start and Connect: events as frames until the command, the deadline or the client ends it."""

    def __init__(self, exchange: Exchange, processes: Processes, *, starts: bool) -> None:
        self._exchange = exchange
        self._processes = processes
        self._starts = starts
        self._body = bytearray()
        self._process: Process | None = None
        milliseconds = int(exchange.headers.get("connect-timeout-ms") or 0)
        loop = processes.loop
        self._deadline = loop.call_later(milliseconds / 1000, self._expire) if milliseconds else None
        self._ping_seconds = float(exchange.headers.get("keepalive-ping-interval") or _PING_SECONDS)
        self._ping = loop.call_later(self._ping_seconds, self._keep_alive)

    @property
    def congested(self) -> bool:
        return self._exchange.congested

    def data(self, chunk: bytes) -> None:
        self._body += chunk

    def end(self) -> None:
        request = next(frames(self._body), {})
        self._exchange.start(200, content_type="application/connect+json", length=None)
        try:
            if self._starts:
                process = self._processes.start(paths.user_of(self._exchange.headers), request)
            else:
                process = self._processes.find(request["process"])
        except Failure as failure:
            self._close({"error": {"code": failure.code, "message": failure.message}})
            return
        self._process = process
        process.watchers.append(self)
        self._exchange.on_drain = process.resume
        self._event(b'{"start":{"pid":%d}}' % process.pid)
        process.resume()

    def output(self, channel: str, chunk: bytes) -> None:
        encoded = binascii.b2a_base64(chunk, newline=False)
        self._event(b'{"data":{"%b":"%b"}}' % (channel.encode(), encoded))

    def ended(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        killed = code < 0
        word = f"signal: {(signal.strsignal(-code) or str(-code)).lower()}" if killed else f"exit status {code}"
        end = {"exitCode": -1 if killed else code, "exited": not killed, "status": word}
        self._event(json.dumps({"end": {**end, **({"error": word} if code else {})}}).encode())
        self._close({})

    def closed(self) -> None:
        self._ping.cancel()
        if self._deadline:
            self._deadline.cancel()
        process, self._process = self._process, None
        if process and self in process.watchers:
            process.watchers.remove(self)
            process.resume()

    def _event(self, event: bytes) -> None:
        if self._exchange.started:
            self._exchange.send(frame(b'{"event":%b}' % event))

    def _keep_alive(self) -> None:
        self._event(b'{"keepalive":{}}')
        self._ping = self._processes.loop.call_later(self._ping_seconds, self._keep_alive)

    def _expire(self) -> None:
        """The caller's time is up: it ends a command that it started, and only the view of one it joined."""
        process = self._process
        self._close({"error": {"code": "deadline_exceeded", "message": "the operation timed out"}})
        if process and self._starts:
            process.signal(signal.SIGKILL)

    def _close(self, last: dict[str, Any]) -> None:
        if not self._exchange.started:
            self._exchange.start(200, content_type="application/connect+json", length=None)
        if not self._exchange.finished:
            self._exchange.send(frame(json.dumps(last).encode(), flags=2))
            self._exchange.finish()


class InputStream:
    """The request of StreamInput: each piece is written before the next is read."""

    def __init__(self, exchange: Exchange, processes: Processes) -> None:
        self._exchange = exchange
        self._processes = processes
        self._body = bytearray()
        self._process: Process | None = None
        self._unwritten = 0

    def data(self, chunk: bytes) -> None:
        self._body += chunk
        for message in frames(self._body, consume=True):
            if "start" in message:
                self._process = self._processes.find(message["start"]["process"])
            elif "data" in message and self._process:
                self._unwritten += 1
                feed(self._process, message["data"]["input"], self._written)
                self._exchange.pause_body(paused=self._unwritten > 0)

    def _written(self) -> None:
        self._unwritten -= 1
        self._exchange.pause_body(paused=self._unwritten > 0)

    def end(self) -> None:
        self._exchange.start(200, content_type="application/connect+json", length=None)
        self._exchange.send(frame(b"{}"))
        self._exchange.send(frame(b"{}", flags=2))
        self._exchange.finish()

    def closed(self) -> None:
        """The command keeps running."""


class _Confirmation:
    """Answers a kill once the process is gone, so that nobody sees it afterwards."""

    congested = False

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def output(self, channel: str, chunk: bytes) -> None:
        """Others show it."""

    def ended(self, status: int) -> None:
        self._exchange.respond_json({})


def handler(exchange: Exchange, processes: Processes, call: str) -> Handler | None:
    """The handler of a streaming call, or None when `call` is a short one."""
    if call in {"Start", "Connect"}:
        return EventStream(exchange, processes, starts=call == "Start")
    return InputStream(exchange, processes) if call == "StreamInput" else None


def answer(exchange: Exchange, processes: Processes, call: str, request: dict[str, Any]) -> None:
    """Answer a short call."""
    if call == "List":
        exchange.respond_json({"processes": processes.rows()})
        return
    process = processes.find(request["process"])
    if call == "SendInput":
        feed(process, request["input"], lambda: exchange.respond_json({}))
        return
    if call == "SendSignal":
        number = _SIGNALS.get(request.get("signal", 0), request.get("signal", 0))
        if number == signal.SIGKILL:
            process.watchers.append(_Confirmation(exchange))
            process.signal(number)
            return
        process.signal(number)
    elif call == "CloseStdin":
        process.close_input()
    elif call == "Update" and process.terminal is not None:
        size = request["pty"]["size"]
        set_size(process.terminal, size.get("rows", 24), size.get("cols", 80))
    else:
        raise Failure(501, "unimplemented", call)
    exchange.respond_json({})


def feed(process: Process, data: dict[str, str], written: Callable[[], None]) -> None:
    process.feed(binascii.a2b_base64(data.get("stdin") or data.get("pty") or ""), written)


def frame(message: bytes, *, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(message)) + message


def frames(buffer: bytearray, *, consume: bool = False) -> Iterator[dict[str, Any]]:
    """The whole messages at the start of `buffer`."""
    position = 0
    while len(buffer) >= position + 5:
        length = int.from_bytes(buffer[position + 1 : position + 5], "big")
        if len(buffer) < position + 5 + length:
            return
        message = json.loads(buffer[position + 5 : position + 5 + length] or b"{}")
        if consume:
            del buffer[: 5 + length]
        else:
            position += 5 + length
        yield message
