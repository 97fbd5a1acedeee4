"""The little of ASGI that the service needs: its types, headers by name, the connection, and a JSON answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CONNECTION = "connection"
"""In the scope's state: the client's connection, where the server puts it there."""


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def connection_of(scope: Scope) -> asyncio.Transport | None:
    """The client's connection; None where the server does not tell."""
    found: asyncio.Transport | None = scope.get("state", {}).get(CONNECTION)
    return found


async def read_body(receive: Receive, limit_bytes: int) -> bytes | None:
    """The whole body, or None when it is longer than allowed or its sender left."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or len(body) > limit_bytes:
            return None
        if not message.get("more_body"):
            return bytes(body)


async def respond(send: Send, status: int, value: object = None, headers: dict[str, str] | None = None) -> None:
    body = b"" if value is None else json.dumps(value).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode(), text.encode()) for name, text in fields.items() if status != 204 or name != "content-type"]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
