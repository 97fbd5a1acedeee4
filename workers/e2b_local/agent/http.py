"""HTTP/1.1 on a non-blocking socket: one exchange at a time, bodies streamed in both directions, bounded buffers."""

from __future__ import annotations

import json
import os
import socket

from .loop import READ, WRITE, Loop

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Handler(Protocol):
        """What a body is given to. `closed` is called once, when the exchange is over or its peer is gone."""

        def data(self, chunk: bytes) -> None: ...

        def end(self) -> None: ...

        def closed(self) -> None: ...

    Route = Callable[["Exchange"], Handler]

_READ_BYTES = 262_144
_HEAD_BYTES = 65_536
# A response whose unsent part is larger is congested: its source must stop until it has drained.
_CONGESTED_BYTES = 262_144
# A body that must be held as a whole may not be larger.
_WHOLE_BODY_BYTES = 67_108_864
_REASONS = {200: "OK", 204: "No Content"}


class Failure(Exception):
    """A request that ends in an error answer: the HTTP status and the JSON body."""

    def __init__(self, status: int, code: object, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class Discard:
    """A request body nobody wants."""

    def data(self, chunk: bytes) -> None:
        """Drop it."""

    def end(self) -> None:
        """Nothing was kept."""

    def closed(self) -> None:
        """Nothing is held."""


class Exchange:
    """One request and its response."""

    def __init__(self, connection: Connection, method: str, target: str, headers: dict[str, str]) -> None:
        self.method = method
        path, _, query = target.partition("?")
        self.path = unquote(path)
        self.query = dict(_query_pair(pair) for pair in query.split("&") if pair)
        self.headers = headers
        self.started = False
        self.finished = False
        self.on_drain: Callable[[], None] | None = None
        self._chunked = False
        self._connection = connection

    def respond(
        self, status: int, body: bytes = b"", *, content_type: str = "application/json", headers: str = ""
    ) -> None:
        self.start(status, content_type=content_type, length=len(body), headers=headers)
        self.send(body)
        self.finish()

    def respond_json(self, value: object, *, status: int = 200) -> None:
        self.respond(status, json.dumps(value).encode())

    def start(self, status: int, *, content_type: str, length: int | None, headers: str = "") -> None:
        """Begin the response; without a length it is chunked. `headers` are whole lines."""
        self.started = True
        self._chunked = length is None
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        reason = _REASONS.get(status, "Error")
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: {content_type}\r\n{framing}\r\n{headers}\r\n"
        self._connection.write(head.encode("utf-8", "surrogateescape"))

    def send(self, data: bytes) -> None:
        if data:
            self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self) -> None:
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        self.finished = True
        self._connection.settle()

    def abort(self) -> None:
        """Break off a response that cannot be completed, so that its reader sees it is not whole."""
        self._connection.close()

    @property
    def congested(self) -> bool:
        return self._connection.unsent_bytes > _CONGESTED_BYTES

    def pause_body(self, *, paused: bool) -> None:
        self._connection.pause(paused=paused)


class Connection:
    """A socket from the host; when it is lost, the handler of its exchange is told."""

    def __init__(self, loop: Loop, sock: socket.socket, route: Route) -> None:
        sock.settimeout(0)
        self._loop, self._socket, self._route = loop, sock, route
        self._in = bytearray()
        self._out = bytearray()
        self._exchange: Exchange | None = None
        self._handler: Handler = Discard()
        self._body_left: int | None = None  # None: chunked, or no exchange
        self._body_done = True
        self._paused = False
        self._open = True
        self._watched = 0
        self._watch()

    @property
    def unsent_bytes(self) -> int:
        return len(self._out)

    def write(self, data: bytes) -> None:
        if not self._open:
            return
        self._out += data
        self._flush()

    def pause(self, *, paused: bool) -> None:
        if self._paused and not paused:
            # Not at once: whoever resumes may be in the middle of using an earlier piece.
            self._loop.call_later(0, self._advance)
        self._paused = paused
        self._watch()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.watch(self._socket.fileno(), 0, self._ready)
            self._socket.close()
            self._in.clear()
            self._out.clear()
            self._over()

    def settle(self) -> None:
        """Make room for the next exchange once this one's request and response are both complete."""
        if self._exchange and self._exchange.finished and self._body_done:
            self._over()

    def _over(self) -> None:
        handler, self._handler = self._handler, Discard()
        self._exchange = None
        handler.closed()

    def _watch(self) -> None:
        if self._open:
            events = (0 if self._paused else READ) | (WRITE if self._out else 0)
            if events != self._watched:
                self._watched = events
                self._loop.watch(self._socket.fileno(), events, self._ready)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
            if self._exchange and self._exchange.on_drain and not self._exchange.congested:
                self._exchange.on_drain()
        if events & READ and self._open:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self._in += data
            self._advance()

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self._socket.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        self._watch()

    def _advance(self) -> None:
        """Use up what has arrived: heads open exchanges, bodies go to their handlers."""
        while self._open and not self._paused:
            if self._exchange is None:
                if not self._open_exchange():
                    return
            elif self._body_done or not self._feed_body():
                return

    def _open_exchange(self) -> bool:
        end = self._in.find(b"\r\n\r\n")
        if end < 0:
            if len(self._in) > _HEAD_BYTES:
                self.close()
            return False
        line, *lines = self._in[:end].decode("latin-1").split("\r\n")
        del self._in[: end + 4]
        method, target, _ = line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (text.partition(":") for text in lines)}
        chunked = headers.get("transfer-encoding", "") == "chunked"
        self._body_left = None if chunked else int(headers.get("content-length", "0"))
        self._body_done = False
        exchange = self._exchange = Exchange(self, method, target, headers)
        self._guard(lambda: self._choose(exchange))
        return True

    def _choose(self, exchange: Exchange) -> None:
        self._handler = self._route(exchange)

    def _feed_body(self) -> bool:
        """Give one piece of the body to the handler; whether there may be more to do."""
        piece = self._take_piece()
        if piece is None:
            return False
        if piece:
            self._guard(lambda: self._handler.data(piece))
        else:
            self._body_done = True
            self._guard(lambda: self._handler.end())
            self.settle()
        return True

    def _take_piece(self) -> bytes | None:
        """The next piece of the body, b"" at its end, None when more must arrive first."""
        if self._body_left is not None:
            piece = bytes(self._in[: self._body_left])
            if self._body_left and not piece:
                return None
            self._body_left -= len(piece)
            del self._in[: len(piece)]
            return piece
        end = self._in.find(b"\r\n")
        if end < 0:
            return None
        size = int(self._in[:end], 16)
        if len(self._in) < end + size + 4:
            return None
        piece = bytes(self._in[end + 2 : end + 2 + size])
        del self._in[: end + size + 4]
        return piece

    def _guard(self, step: Callable[[], None]) -> None:
        """Run a step of the handler; its failure is the answer, and the rest of the body is discarded."""
        exchange = self._exchange
        try:
            step()
        except Failure as failure:
            self._fail(exchange, failure)
        except OSError as error:
            self._fail(exchange, Failure(500, "internal", os.strerror(error.errno or 0)))
        except (ValueError, KeyError, TypeError, AttributeError, MemoryError, RecursionError) as error:
            self._fail(exchange, Failure(400, "invalid_argument", f"{type(error).__name__}: {error}"))

    def _fail(self, exchange: Exchange | None, failure: Failure) -> None:
        if exchange is None or exchange is not self._exchange:
            return
        if exchange.started:
            self.close()
            return
        handler, self._handler = self._handler, Discard()
        handler.closed()
        exchange.respond_json({"code": failure.code, "message": failure.message}, status=failure.status)


def collect(buffer: bytearray, chunk: bytes) -> None:
    """Add to a body that is held as a whole."""
    buffer += chunk
    if len(buffer) > _WHOLE_BODY_BYTES:
        raise Failure(400, "invalid_argument", "request body too large")


def unquote(text: str) -> str:
    """Percent-decoding; urllib.parse would cost every sandbox 3 ms of start."""
    first, *rest = text.encode("utf-8", "surrogateescape").split(b"%")
    out = [first]
    for part in rest:
        try:
            out.append(bytes([int(part[:2], 16)]) + part[2:])
        except ValueError:
            out.append(b"%" + part)
    return b"".join(out).decode("utf-8", "surrogateescape")


def _query_pair(pair: str) -> tuple[str, str]:
    name, _, value = pair.replace("+", " ").partition("=")
    return unquote(name), unquote(value)
