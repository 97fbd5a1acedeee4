"""Who may talk to a Terminus server: on loopback everybody on this host, elsewhere whoever shows the token."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.errors import SettingsError


class BearerToken:
    """ASGI middleware: every HTTP and WebSocket request needs `Authorization: Bearer <token>`."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what carries the token; 401, or a refused handshake, for the rest."""
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"a bearer token is required\n"})


def check_exposure(host: str, token: str | None) -> None:
    """Refuse to listen beyond loopback without a token."""
    if token is None and not is_loopback(host):
        raise SettingsError(
            f"host {host}: a server that others can reach needs a token; give one, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this host can reach what listens on `host`; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
