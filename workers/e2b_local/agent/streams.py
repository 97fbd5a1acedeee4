"""The process service's streaming calls: Start, Connect and StreamInput.

A stream is a sequence of messages, each behind one byte of flags and four of length; flag 2 marks the last, which
tells whether the call failed.
"""

from __future__ import annotations

import binascii
import json
import os
import signal
import struct

from . import paths
from .commands import Processes, feed
from .http import Exchange, Failure, collect
from .processes import Process

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .http import Handler

_PING_SECONDS = 90.0


def handler(exchange: Exchange, processes: Processes, call: str) -> Handler | None:
    """The handler of a streaming call, or None when `call` is a short one."""
    if call in {"Start", "Connect"}:
        return EventStream(exchange, processes, starts=call == "Start")
    return InputStream(exchange, processes) if call == "StreamInput" else None


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
        self._ping_seconds = max(1.0, float(exchange.headers.get("keepalive-ping-interval") or _PING_SECONDS))
        self._ping = loop.call_later(self._ping_seconds, self._keep_alive)

    @property
    def congested(self) -> bool:
        return self._exchange.congested

    def data(self, chunk: bytes) -> None:
        collect(self._body, chunk)

    def end(self) -> None:
        request = next(_frames(self._body), {})
        self._exchange.start(200, content_type="application/connect+json", length=None)
        try:
            if self._starts:
                process = self._processes.start(paths.user_of(self._exchange.headers), request)
            else:
                process = self._processes.find(request["process"])
        except Failure as failure:
            self._close({"error": {"code": failure.code, "message": failure.message}})
            return
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            self._close({"error": {"code": "invalid_argument", "message": f"{type(error).__name__}: {error}"}})
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
        process = self._process
        if process and self in process.watchers:
            process.watchers.remove(self)
            process.resume()
        # A started command is held to its time also when its caller has left; it does not end with the caller.
        if self._deadline and not (self._starts and process and process.running):
            self._deadline.cancel()

    def _event(self, event: bytes) -> None:
        if self._exchange.started:
            self._exchange.send(_frame(b'{"event":%b}' % event))

    def _keep_alive(self) -> None:
        self._event(b'{"keepalive":{}}')
        self._ping = self._processes.loop.call_later(self._ping_seconds, self._keep_alive)

    def _expire(self) -> None:
        """The caller's time is up: it ends a command that it started, and only the view of one it joined."""
        self._close({"error": {"code": "deadline_exceeded", "message": "the operation timed out"}})
        if self._process and self._starts:
            self._process.signal(signal.SIGKILL)

    def _close(self, last: dict[str, Any]) -> None:
        if not self._exchange.started:
            self._exchange.start(200, content_type="application/connect+json", length=None)
        if not self._exchange.finished:
            self._exchange.send(_frame(json.dumps(last).encode(), flags=2))
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
        collect(self._body, chunk)
        for message in _frames(self._body, consume=True):
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
        self._exchange.send(_frame(b"{}"))
        self._exchange.send(_frame(b"{}", flags=2))
        self._exchange.finish()

    def closed(self) -> None:
        """The command keeps running."""


def _frame(message: bytes, *, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(message)) + message


def _frames(buffer: bytearray, *, consume: bool = False) -> Iterator[dict[str, Any]]:
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
