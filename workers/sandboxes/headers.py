"""The one place that reaches into the e2b SDK: what was answered to this thread's last call, below its exceptions.

The SDK's exceptions carry no headers, and an undecodable body hides even the status; the two kinds of 429 differ by
headers alone. And it makes the same exceptions of an agent's words and of a page that a proxy answers in the agent's
place. So the transport that the SDK asks `e2b.api.client_sync.get_transport` for is wrapped once, at import, in a
pass-through that notes status and headers, and so is how `e2b.envd.client_sync` judges the answers of commands and of
files' entries. Two things are changed on the way: an agent is told a little less time for a command than the SDK waits,
so that whose time ran out is known by who says so; and what an agent answers whole is refused past 1 MiB, where the SDK
would take in whatever a policy can make it say of a file. The SDK's retries of refused connections (three, 1.8 s in
all) are switched off at the same place: a call here is one attempt. When the SDK moves any of these, importing this
module fails and says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import e2b
import e2b.api.client_sync as seam
import e2b.envd.client_sync as agent_seam
import httpx
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from pyqwest import SyncResponse


@dataclass(frozen=True)
class Answer:
    """What the server answered, before the SDK made an exception of it."""

    status: int
    retry_after_seconds: float | None
    error_code: str | None
    names_a_rate: bool = False
    """It carries a RateLimit-* header, and none that says that requests remain."""
    is_json: bool = True
    """What the API itself answers is; a page of a proxy in front of it is not."""


class _Noted(threading.local):
    answer: Answer | None = None
    page: int | None = None


_noted = _Noted()


def forget_answer() -> None:
    """Call before a request, so that an older answer is never taken for its own."""
    _noted.answer = None
    _noted.page = None


def last_answer() -> Answer | None:
    """The last answer this thread received since `forget_answer`; None when none came."""
    return _noted.answer


def last_page() -> int | None:
    """Status of the page by which something in front of the agent answered in its place; None when nothing did."""
    return _noted.page


class _Noting(httpx.BaseTransport):
    def __init__(self, inner: httpx.BaseTransport) -> None:
        self._inner = inner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        _noted.answer = Answer(
            status=response.status_code,
            retry_after_seconds=_seconds(response.headers.get("retry-after")),
            error_code=_error_code(response),
            names_a_rate=_names_a_rate(response.headers),
            is_json="json" in response.headers.get("content-type", ""),
        )
        if response.status_code >= 400 and not _noted.answer.is_json:
            _noted.page = response.status_code
        return response

    # The SDK shares one pool behind all its clients: closing a client must not close it, so `close` stays a no-op.


def open_pools(config: e2b.ConnectionConfig) -> None:
    """Make the SDK's connection pools, which starts its runtime and reads the system's certificates (about 30 ms)."""
    for streaming in (False, True):
        seam.get_transport(config, for_streaming=streaming)


def _seconds(header: str | None) -> float | None:
    """Retry-After as seconds; a header that is there but unreadable (a date) still means the rate kind: 1 s."""
    if header is None:
        return None
    return float(header) if header.isascii() and header.isdigit() else 1.0


def _names_a_rate(headers: httpx.Headers) -> bool:
    limits = {name: value for name, value in headers.items() if name.removeprefix("x-").startswith("ratelimit")}
    remaining = [value for name, value in limits.items() if name.endswith("-remaining")]
    return bool(limits) and not any(value.isascii() and value.isdigit() and int(value) > 0 for value in remaining)


def _error_code(response: httpx.Response) -> str | None:
    if response.status_code not in (409, 422):  # the statuses of the idempotency codes; other bodies stay unread
        return None
    response.read()
    try:
        body = response.json()
    except ValueError:
        return None
    code = body.get("error_code") if isinstance(body, dict) else None
    return code if isinstance(code, str) else None


def _wrap(get_transport: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> _Noting:
        return _Noting(get_transport(*args, **kwargs))

    return noting


def _note_page(judge: Callable[[int, str, bytes], Exception | None]) -> Callable[[int, str, bytes], Exception | None]:
    def noting(status: int, content_type: str, body: bytes) -> Exception | None:
        error = judge(status, content_type, body)
        if error is not None:
            _noted.page = status
        return error

    return noting


_AGENT_SAYS = ("application/connect", "application/json", "application/proto")
"""How the content types of Connect begin, which an agent speaks."""

_STREAMED = "application/connect"
"""Content types of answers that come in pieces, for whose sum the caller has a limit."""

_ANSWER_BYTES = 2**20
"""An honest answer of one piece has some kilobytes."""


class _Bounded:
    """A transport that reads answers of one piece itself, up to a bound; past it the connection is dropped."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def execute_sync(self, request: Any) -> SyncResponse:
        response: SyncResponse = self._inner.execute_sync(request)
        content_type = response.headers.get("content-type", "")
        if content_type.startswith(_STREAMED):
            return response
        body = bytearray()
        with response:
            for chunk in response.content:
                body += chunk
                if len(body) > _ANSWER_BYTES:
                    if not content_type.startswith(_AGENT_SAYS):
                        _noted.page = response.status
                    raise ConnectError(Code.OUT_OF_RANGE, f"the answer has more than {_ANSWER_BYTES} bytes")
        return SyncResponse(status=response.status, headers=response.headers, content=bytes(body))


def _bound(init: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def bounded(transport: Any, inner: Any) -> None:
        init(transport, _Bounded(inner))

    return bounded


_TIMEOUT = "connect-timeout-ms"
_EARLIER_MS = 1_000
"""How much sooner than the SDK an agent gives a command up, at most; a quarter of the time where that is less."""


def _ask_of_agents(execute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def asking(transport: Any, request: Any) -> Any:
        if request.url.endswith("/process.Process/Start") and (text := request.headers.get(_TIMEOUT)):
            whole = int(text)
            request.headers[_TIMEOUT] = str(max(1, whole - min(_EARLIER_MS, whole // 4)))
        response = execute(transport, request)
        if response.status < 400 and not response.headers.get("content-type", "").startswith(_AGENT_SAYS):
            _noted.page = response.status  # of maintenance, say: whoever answers so is no agent
        return response

    return asking


if not callable(getattr(seam, "get_transport", None)) or not hasattr(seam, "connection_retries"):
    raise ImportError(
        "this e2b release moved e2b.api.client_sync.get_transport or .connection_retries, the seam that"
        " workers/sandboxes/headers.py needs to tell the two kinds of 429 apart; pin an older e2b or move the seam"
    )
if not callable(getattr(agent_seam, "plain_http_error", None)) or not hasattr(agent_seam, "PlainHTTPErrorTransport"):
    raise ImportError(
        "this e2b release moved e2b.envd.client_sync.plain_http_error or .PlainHTTPErrorTransport, by which"
        " workers/sandboxes/headers.py tells a proxy's answer from an agent's; pin an older e2b or move the seam"
    )
_agents = agent_seam.PlainHTTPErrorTransport
_agents.__init__ = _bound(_agents.__init__)  # type: ignore[method-assign,assignment]
_agents.execute_sync = _ask_of_agents(_agents.execute_sync)  # type: ignore[method-assign,assignment]
agent_seam.plain_http_error = _note_page(agent_seam.plain_http_error)  # type: ignore[attr-defined,assignment]
seam.get_transport = _wrap(seam.get_transport)
seam.connection_retries = 0
