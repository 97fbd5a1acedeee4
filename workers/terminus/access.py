"""Who may talk to a Terminus server that has a token: whoever shows it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.exposure import shows_token


class BearerToken:
    """ASGI middleware: every HTTP and WebSocket request needs `Authorization: Bearer <token>`."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what carries the token; 401, or a refused handshake, for the rest."""
        given = dict(scope.get("headers", [])).get(b"authorization", b"").decode("latin-1")
        if scope["type"] == "lifespan" or shows_token(given, self._token):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"a bearer token is required\n"})
