"""Requests for the inside of a sandbox, from the client to its agent and back, streamed both ways.

When a sandbox ends, its open responses break off without their last chunk, and later requests are told 502
"The sandbox was not found": together that is how the SDK knows that a sandbox is gone.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import time
from urllib.parse import parse_qs

from workers.e2b_local.asgi import Message, Receive, Scope, Send, headers_of, respond
from workers.e2b_local.channel import AgentGone, Connection
from workers.e2b_local.sandboxes import Registry, Sandbox

AGENT_PORT = "49983"
_PASSED_ON = {
    b"accept-encoding",
    b"authorization",
    b"connect-timeout-ms",
    b"content-encoding",
    b"content-type",
    b"keepalive-ping-interval",
}
_DROPPED = {b"connection", b"transfer-encoding"}
_PIECE_BYTES = 65_536
_DEATH_SECONDS = 1.0
# An agent sends less; what has taken one over may not fill the service's memory.
_CHUNK_BYTES = 1_048_576
_LONGEST_BYTES = 1 << 40


class Proxy:
    """Finds the sandbox that a request is for, and passes it on."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def addressee(self, scope: Scope) -> str | None:
        """The sandbox id a request is for, or None when it is for the control plane."""
        headers = headers_of(scope)
        if sandbox_id := headers.get("e2b-sandbox-id"):
            return sandbox_id
        port, dash, rest = headers.get("host", "").partition(".")[0].partition("-")
        if dash and port.isdigit():
            return rest
        if scope["path"] == "/files":
            # A signed link on a base address shared by all: only its sandbox's token explains the signature.
            return next((box.id for box in self._registry.all() if _is_signed(scope, box.token)), "unknown")
        return None

    async def forward(self, sandbox_id: str, scope: Scope, receive: Receive, send: Send) -> None:
        sandbox = self._registry.find(sandbox_id)
        port = headers_of(scope).get("e2b-sandbox-port", AGENT_PORT)
        if sandbox is None or sandbox.ending or sandbox.state != "running":
            await _refuse(send, sandbox_id, 502, "The sandbox was not found")
        elif port != AGENT_PORT:
            await _refuse(send, sandbox_id, 502, "The sandbox is running but the port is not open")
        elif problem := _unauthorized(scope, sandbox.token):
            await respond(send, 401, {"code": 401, "message": problem})
        else:
            await self._exchange(sandbox, scope, receive, send)

    async def _exchange(self, sandbox: Sandbox, scope: Scope, receive: Receive, send: Send) -> None:
        transfer: _Transfer | None = None
        try:
            connection = await sandbox.channel.connect()
            transfer = _Transfer(connection, scope, receive, send)
            if await transfer.run():
                sandbox.channel.release(connection)
                return
        except (AgentGone, OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            if transfer is None or not transfer.answering:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(sandbox.gone.wait(), _DEATH_SECONDS)
                alive = not sandbox.gone.is_set()
                what = "The sandbox agent does not answer" if alive else "The sandbox was not found"
                await _refuse(send, sandbox.id, 502, what)
        finally:
            if transfer and not transfer.complete:
                transfer.connection.close()
        # An answer that is not whole: returning now makes the server cut the client's connection.


class _Transfer:
    """One request and its response on an agent's connection."""

    def __init__(self, connection: Connection, scope: Scope, receive: Receive, send: Send) -> None:
        self.connection = connection
        self.answering = False
        self.complete = False
        self._scope, self._receive, self._send = scope, receive, send
        self._uploaded = False

    async def run(self) -> bool:
        """Whether the exchange is complete, so that the connection can carry another."""
        first = await self._receive()
        if first["type"] == "http.disconnect":
            return False
        self._write_head(first)
        inbound = asyncio.create_task(self._upload(first))
        outbound = asyncio.create_task(self._download())
        try:
            await asyncio.wait((inbound, outbound), return_when=asyncio.FIRST_COMPLETED)
            if inbound.done() and not outbound.done() and inbound.exception() is not None:
                # The agent hung up on the request; it may have said why.
                await asyncio.wait((outbound,), timeout=_DEATH_SECONDS)
            if outbound.done():
                await outbound
                self.complete = self._uploaded
            return self.complete
        finally:
            for task in (inbound, outbound):
                task.cancel()
            await asyncio.gather(inbound, outbound, return_exceptions=True)

    def _write_head(self, first: Message) -> None:
        scope = self._scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
        for name, value in scope["headers"]:
            if name in _PASSED_ON or name.startswith(b"x-metadata-"):
                lines.append(name + b": " + value)
        if first.get("more_body"):
            lines.append(b"transfer-encoding: chunked")
        else:
            lines.append(b"content-length: %d" % len(first.get("body", b"")))
        self.connection.writer.write(b"\r\n".join(lines) + b"\r\n\r\n")

    async def _upload(self, first: Message) -> None:
        """Pass the request's body on, then wait for the client to leave."""
        message, writer = first, self.connection.writer
        chunked = bool(first.get("more_body"))
        while message["type"] == "http.request":
            body = message.get("body", b"")
            for start in range(0, len(body), _PIECE_BYTES):
                piece = body[start : start + _PIECE_BYTES]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                await writer.drain()
            if not message.get("more_body"):
                if chunked:
                    writer.write(b"0\r\n\r\n")
                    await writer.drain()
                self._uploaded = True
                break
            message = await self._receive()
        while message["type"] != "http.disconnect":
            message = await self._receive()

    async def _download(self) -> None:
        reader = self.connection.reader
        head = await reader.readuntil(b"\r\n\r\n")
        status_line, *lines = head[:-4].split(b"\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        length = next((int(value) for name, value in headers if name == b"content-length"), None)
        _check_size(length or 0, _LONGEST_BYTES)
        kept = [(name, value) for name, value in headers if name not in _DROPPED]
        status = int(status_line.split(b" ")[1])
        self.answering = True
        await self._send({"type": "http.response.start", "status": status, "headers": kept})
        if length is None:
            await self._download_chunks()
        else:
            while length:
                data = await reader.read(min(length, _PIECE_BYTES))
                if not data:
                    raise EOFError
                length -= len(data)
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def _download_chunks(self) -> None:
        reader = self.connection.reader
        while size := int(await reader.readuntil(b"\r\n"), 16):
            _check_size(size, _CHUNK_BYTES)
            data = await reader.readexactly(size + 2)
            await self._send({"type": "http.response.body", "body": data[:-2], "more_body": True})
        await reader.readexactly(2)


def _check_size(size: int, most: int) -> None:
    if not 0 <= size <= most:
        raise ValueError(f"an agent announced {size} bytes")


async def _refuse(send: Send, sandbox_id: str, status: int, message: str) -> None:
    await respond(send, status, {"sandboxId": sandbox_id, "message": message, "code": status})


def _unauthorized(scope: Scope, token: str) -> str | None:
    """Why a request may not pass, or None. The agent itself never sees a token."""
    if scope["path"] == "/health":
        return None
    given = headers_of(scope).get("x-access-token")
    if given is not None:
        return None if hmac.compare_digest(given.encode(), token.encode()) else "the access token does not match"
    if scope["path"] != "/files":
        return "unauthorized access, please provide a valid access token or method signing if supported"
    query = _query(scope)
    if "signature" not in query:
        return "missing signature query parameter"
    if not _is_signed(scope, token):
        return "invalid signature"
    expires = query.get("signature_expiration")
    return "signature is already expired" if expires and int(expires) < time.time() else None


def _is_signed(scope: Scope, token: str) -> bool:
    query = _query(scope)
    operation = "read" if scope["method"] == "GET" else "write"
    parts = [query.get("path", ""), operation, query.get("username", ""), token]
    if "signature_expiration" in query:
        parts.append(query["signature_expiration"])
    digest = hashlib.sha256(":".join(parts).encode()).digest()
    expected = "v1_" + base64.b64encode(digest).decode().rstrip("=")
    return hmac.compare_digest(query.get("signature", "").encode(), expected.encode())


def _query(scope: Scope) -> dict[str, str]:
    parsed = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return {name: values[-1] for name, values in parsed.items()}
