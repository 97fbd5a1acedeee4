"""Who may see the page, and how a browser may use it.

What always holds: with a token, nothing is answered without it, as a bearer token or as the password of HTTP Basic
authentication, which browsers ask for by themselves and which stands in no address and no log; without one, only
requests that name this host are answered, so that no foreign web page reaches a loopback server through a name of its
own; only what the page needs is let through to Gradio, whose uploads, files and proxies stay shut; a browser gets no
leave to read answers from another origin, and is told to load nothing from one.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
from collections.abc import Callable, Iterable

from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.exposure import STRANGE_HOST, is_host, names_this_host, shows_token

logger = logging.getLogger(__name__)

_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Gradio's front end evaluates templates and has inline scripts; all of it comes from here."""
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_NAMES = (b"host", b"x-forwarded-host")
_ASSETS = ("/assets/", "/static/")
_READ = frozenset({"/", "/theme.css", "/gradio_api/app_id"})
_ASK = "/gradio_api/run/predict"
_QUESTION_BYTES = 16 * 1024
_GETTING_READY_SECONDS = 0.5
_WAIT = """<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="1"><title>rollout farm</title>
<body style="font: 16px system-ui, sans-serif; padding: 2em">The dashboard is getting ready; this takes a few seconds,
once.</body>
"""


def refusal(headers: Headers, token: str | None) -> Response | None:
    """Why a request is not answered, or None when it is."""
    if token is not None:
        if _shows(headers.get("authorization", ""), token):
            return None
        return PlainTextResponse(
            "a token is required: as a bearer token, or as the password of any user name\n",
            status_code=401,
            headers={"WWW-Authenticate": 'Basic realm="rollout-farm", charset="UTF-8"'},
        )
    if names_this_host(headers.get("host", "")):
        return None
    return PlainTextResponse(STRANGE_HOST, status_code=403)


class Gate:
    """The page behind its conditions; it is made when the first request comes, since Gradio takes seconds to import."""

    def __init__(self, make: Callable[[], ASGIApp], *, token: str | None) -> None:
        self._make = make
        self._token = token
        self._making: asyncio.Future[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request below the page's path."""
        if scope["type"] != "http":
            return
        refused = refusal(Headers(scope=scope), self._token) or _unwanted(scope)
        if refused is None and scope["method"] == "POST":
            body = await _question(Request(scope, receive))
            refused = PlainTextResponse("not a question of the page\n", status_code=400) if body is None else None
            receive = _replayed(body or b"", receive)
        if refused is not None:
            await refused(scope, receive, send)
            return
        try:
            page = await self._made(_GETTING_READY_SECONDS if _path(scope) == "/" else None)
        except TimeoutError:
            await HTMLResponse(_WAIT, status_code=503, headers={**HEADERS, "Retry-After": "1"})(scope, receive, send)
            return
        except ImportError:
            logger.exception("no dashboard")
            text = "the dashboard needs Gradio, which cannot be imported here: pip install 'gradio>=6,<7'\n"
            await PlainTextResponse(text, status_code=503)(scope, receive, send)
            return
        await page({**scope, "headers": _for_gradio(scope["headers"])}, receive, _with_headers(send))

    async def _made(self, seconds: float | None) -> ASGIApp:
        """The page, made once for all; raises TimeoutError when it takes longer than `seconds`."""
        if self._making is None or (self._making.done() and self._making.exception() is not None):
            self._making = asyncio.ensure_future(asyncio.to_thread(self._make))
        return await asyncio.wait_for(asyncio.shield(self._making), seconds)


def _unwanted(scope: Scope) -> Response | None:
    path = _path(scope)
    if scope["method"] in ("GET", "HEAD") and (path in _READ or path.startswith(_ASSETS)):
        return None
    if scope["method"] == "POST" and path == _ASK:
        return None
    return PlainTextResponse("there is nothing here\n", status_code=404)


def _path(scope: Scope) -> str:
    """Below the page's own."""
    return str(scope["path"]).removeprefix(scope.get("root_path", "")) or "/"


async def _question(request: Request) -> bytes | None:
    """The body of a question as Gradio is given it, or None for anything that the page does not send."""
    received = b""
    try:
        async for chunk in request.stream():
            received += chunk
            if len(received) > _QUESTION_BYTES:
                return None
        told = json.loads(received)
        (text,) = told["data"]
        number = told["fn_index"]
    except (ValueError, TypeError, KeyError, RecursionError, ClientDisconnect):
        return None
    if not isinstance(text, str) or number != 0:
        return None
    return json.dumps({"data": [text], "fn_index": 0, "session_hash": None}).encode()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What an application receives that is given this body, and then whatever comes."""
    left = [body]

    async def receiving() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return receiving


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return sending


def _shows(authorization: str, token: str) -> bool:
    kind, _, given = authorization.partition(" ")
    if kind.lower() != "basic":
        return shows_token(authorization, token)
    try:
        password = base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
    except ValueError:  # no base64, no UTF-8, no ASCII
        return False
    return hmac.compare_digest(password.encode(), token.encode())


def _for_gradio(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without what Gradio would answer other origins by, and without names of this host that it cannot read."""
    kept = [(name, value) for name, value in headers if name not in (b"origin", b"x-gradio-server")]
    return [(name, value) for name, value in kept if name not in _NAMES or is_host(_first(name, value))]


def _first(name: bytes, value: bytes) -> str:
    """Of what several proxies have listed, the name that Gradio takes; a Host header is one name."""
    text = value.decode("latin-1")
    return text if name == b"host" else text.partition(",")[0].strip()


def answered(body: object, status: int = 200) -> JSONResponse:
    """An answer of the JSON API, with the same conditions as the page's."""
    return JSONResponse(body, status_code=status, headers=HEADERS)
