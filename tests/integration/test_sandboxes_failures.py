"""What each answer of a control plane becomes, seen through the real SDK; the server here says what a test tells it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import e2b.api.client_sync
import pytest

from orchestrator.errors import (
    AuthenticationFailed,
    ConcurrencyLimited,
    CreateRejected,
    NothingSent,
    OutcomeUnknown,
    ProviderError,
    RateLimited,
    SandboxGone,
)
from orchestrator.provider import CreateRequest
from workers.sandboxes import headers
from workers.sandboxes.provider import E2BProvider

REQUEST = CreateRequest("t-1", "base", 60, allow_internet_access=False)
JSON = json.dumps({"code": 1, "message": "told so"}).encode()
HTML = b"<html><body>slow down</body></html>"


@dataclass
class Script:
    """The answer to give, and how many requests came."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = JSON
    hang_up: bool = False
    requests: int = 0


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def provider(script: Script) -> Iterator[E2BProvider]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            script.requests += 1
            self.rfile.read(int(self.headers.get("content-length") or 0))
            if script.hang_up:
                self.close_connection = True
                return
            self.send_response(script.status)
            kind = {"content-type": "application/json"} if script.body.startswith(b"{") else {}
            for name, value in {"content-length": str(len(script.body)), **kind, **script.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(script.body)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield E2BProvider("e2b_key", api_url=f"http://127.0.0.1:{server.server_port}", request_seconds=2)
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.mark.parametrize(
    ("status", "answer_headers", "body", "error"),
    [
        (400, {}, JSON, CreateRejected),
        (401, {}, JSON, AuthenticationFailed),
        (403, {}, JSON, AuthenticationFailed),
        (404, {}, JSON, CreateRejected),
        (422, {}, JSON, CreateRejected),
        (429, {"Retry-After": "7"}, JSON, RateLimited),
        (429, {}, JSON, ConcurrencyLimited),
        (429, {"Retry-After": "7"}, HTML, RateLimited),
        (429, {"RateLimit-Remaining": "0"}, JSON, RateLimited),
        (429, {"X-RateLimit-Reset": "1"}, JSON, RateLimited),
        (429, {"RateLimit-Limit": "5", "RateLimit-Remaining": "4"}, JSON, ConcurrencyLimited),
        (429, {}, HTML, RateLimited),
        (429, {}, b"", RateLimited),
        (500, {}, JSON, OutcomeUnknown),
        (502, {}, HTML, OutcomeUnknown),
        (503, {}, JSON, OutcomeUnknown),
        (504, {}, b"", OutcomeUnknown),
        (201, {}, HTML, OutcomeUnknown),
        (201, {}, b"{}", OutcomeUnknown),
        (201, {}, b"", OutcomeUnknown),
    ],
)
def test_create_answers(
    provider: E2BProvider,
    script: Script,
    status: int,
    answer_headers: dict[str, str],
    body: bytes,
    error: type[ProviderError],
) -> None:
    script.status, script.headers, script.body = status, answer_headers, body
    with pytest.raises(ProviderError) as raised:
        provider.create(REQUEST)
    assert type(raised.value) is error
    assert script.requests == 1


def test_retry_after_is_passed_on(provider: E2BProvider, script: Script) -> None:
    script.status, script.headers = 429, {"Retry-After": "7"}
    with pytest.raises(RateLimited) as raised:
        provider.create(REQUEST)
    assert raised.value.retry_after_seconds == 7


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (409, "idempotency_in_progress", OutcomeUnknown),
        (422, "idempotency_outcome_unknown", OutcomeUnknown),
        (409, "idempotency_request_mismatch", CreateRejected),
        (422, "idempotency_request_mismatch", CreateRejected),
        (409, None, OutcomeUnknown),
    ],
)
def test_idempotency_answers(
    provider: E2BProvider, script: Script, status: int, code: str | None, error: type[ProviderError]
) -> None:
    script.status = status
    script.body = json.dumps({"code": status, "message": "m", **({"error_code": code} if code else {})}).encode()
    with pytest.raises(error):
        provider.create(REQUEST)


def test_a_lost_answer_is_unknown_and_asked_once(provider: E2BProvider, script: Script) -> None:
    script.hang_up = True
    with pytest.raises(OutcomeUnknown):
        provider.create(REQUEST)
    assert script.requests == 1


def test_an_answer_that_never_comes_is_unknown_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        provider = E2BProvider("e2b_key", api_url=f"http://127.0.0.1:{silent.getsockname()[1]}", request_seconds=0.5)
        with pytest.raises(OutcomeUnknown):
            provider.create(REQUEST)


def test_a_refused_connection_sent_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NothingSent):
        E2BProvider("e2b_key", api_url=f"http://127.0.0.1:{port}").create(REQUEST)


CALLS: dict[str, Callable[[E2BProvider], object]] = {
    "attach": lambda provider: provider.attach("i1", lifetime_seconds=60),
    "delete": lambda provider: provider.delete("i1"),
    "describe": lambda provider: provider.describe("i1"),
    "list": lambda provider: provider.list({"a": "b"}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "answer_headers", "error"),
    [
        (401, {}, AuthenticationFailed),
        (429, {"Retry-After": "1"}, RateLimited),
        (500, {}, OutcomeUnknown),
        (503, {}, OutcomeUnknown),
    ],
)
def test_other_calls_raise_what_they_were_told(
    provider: E2BProvider,
    script: Script,
    call: str,
    status: int,
    answer_headers: dict[str, str],
    error: type[ProviderError],
) -> None:
    script.status, script.headers = status, answer_headers
    with pytest.raises(error):
        CALLS[call](provider)
    assert script.requests == 1


def test_not_existing_is_success_to_delete_absence_to_describe_and_gone_to_attach(
    provider: E2BProvider, script: Script
) -> None:
    script.status = 404
    provider.delete("i1")
    assert provider.describe("i1") is None
    with pytest.raises(SandboxGone):
        provider.attach("i1", lifetime_seconds=60)


def _listed(sandbox_id: str, metadata: dict[str, str]) -> dict[str, object]:
    return {
        "sandboxID": sandbox_id,
        "templateID": "base",
        "clientID": "c",
        "startedAt": "2026-11-29T00:00:00Z",
        "endAt": "2026-11-29T01:00:00Z",
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 1024,
        "state": "paused",
        "envdVersion": "0.6.13",
        "metadata": metadata,
    }


def test_rows_that_a_careless_server_adds_are_left_out(provider: E2BProvider, script: Script) -> None:
    script.body = json.dumps([_listed("ours", {"farm": "a"}), _listed("another", {"farm": "b"})]).encode()
    assert [row.sandbox_id for row in provider.list({"farm": "a"})] == ["ours"]


def test_the_sdk_still_asks_the_seam_for_its_transport() -> None:
    wrapped = e2b.api.client_sync.get_transport
    assert wrapped.__module__ == headers.__name__, (
        "e2b no longer takes its control-plane transport from e2b.api.client_sync.get_transport:"
        " workers/sandboxes/headers.py sees no Retry-After any more; move the seam"
    )
    headers.forget_answer()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NothingSent):
        E2BProvider("e2b_key", api_url=f"http://127.0.0.1:{port}").describe("i1")
    assert headers.last_answer() is None
