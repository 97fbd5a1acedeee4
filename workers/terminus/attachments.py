"""Frees the place of an HTTP-made session whose client vanished.

OpenEnv's MCPToolClient makes its session over HTTP (POST /mcp, openenv/session/create) and attaches a WebSocket to it
(/ws?session_id=...). When such a client dies, OpenEnv keeps its session for good. What does end with the client is the
WebSocket: the kernel closes it. So this middleware counts the WebSockets of each session id, and when a session has had
none for `grace_seconds` it closes the session over the same public call that the client would have made. A live client
keeps its session however long it thinks, since its WebSocket stays open. A client that closes properly has closed the
session long before.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from contextvars import ContextVar
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_over_websocket: ContextVar[bool] = ContextVar("over_websocket", default=False)


def over_websocket() -> bool:
    """Whether what runs now is the handler of a WebSocket."""
    return _over_websocket.get()


class AttachedSessions:
    """ASGI middleware; lives on the server's one event loop."""

    def __init__(self, app: ASGIApp, *, grace_seconds: float = 2.0) -> None:
        self._app = app
        self._grace_seconds = grace_seconds
        self._attached: Counter[str] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on; note the WebSockets that carry a session id."""
        _over_websocket.set(scope["type"] == "websocket")
        session_id = _session_id(scope)
        if session_id is None:
            await self._app(scope, receive, send)
            return
        self._attached[session_id] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._attached[session_id] -= 1
            if self._attached[session_id] <= 0:
                del self._attached[session_id]
                self._close_later(session_id)

    def _close_later(self, session_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._close(session_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, session_id: str) -> None:
        await asyncio.sleep(self._grace_seconds)
        if session_id in self._attached:
            return
        answer = await _post_mcp(self._app, "openenv/session/close", {"session_id": session_id})
        # An error means that the client closed it itself, within the grace: nothing to do.
        if answer.get("error") is None:
            logger.info("vanished client's session closed", extra={"session_id": session_id})


def _session_id(scope: Scope) -> str | None:
    if scope["type"] != "websocket":
        return None
    values = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_id")
    return values[0] if values else None


async def _post_mcp(app: ASGIApp, method: str, params: dict[str, Any]) -> dict[str, Any]:
    """One JSON-RPC request to the application below, without a network in between."""
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/mcp",
        "raw_path": b"/mcp",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "client": None,
        "server": None,
    }
    answer = bytearray()

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        answer.extend(message.get("body", b""))

    await app(scope, receive, send)
    parsed: dict[str, Any] = json.loads(bytes(answer))
    return parsed
