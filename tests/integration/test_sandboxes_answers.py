"""What an agent answers in one piece is taken in up to a bound, through the real SDK; the server here never ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from orchestrator.errors import ArtifactMissing, OutcomeUnknown, ProviderError
from orchestrator.provider import CreateRequest
from workers.sandboxes.provider import E2BProvider

_CREATED = {"templateID": "base", "sandboxID": "i1", "clientID": "c", "envdVersion": "0.6.13", "envdAccessToken": "t"}
_STAT = "/filesystem.Filesystem/Stat"
_CHUNK = b" " * 65536
_MOST = 256 * 2**20


class Endless:
    """Creates a sandbox whose agent says a quarter of a gigabyte of any file; how much of each answer was taken."""

    def __init__(self, status: int, content_type: str) -> None:
        self.taken: list[int] = []
        endless = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.path != _STAT:
                    created = b"" if self.command == "GET" else json.dumps(_CREATED).encode()
                    self.send_response(201 if created else 204)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(created)))
                    self.end_headers()
                    self.wfile.write(created)
                    return
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(_MOST))
                self.end_headers()
                self.close_connection = True
                taken = 0
                try:
                    while taken < _MOST:
                        taken += self.wfile.write(_CHUNK)
                except OSError:
                    pass
                finally:
                    endless.taken.append(taken)

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def endless(request: pytest.FixtureRequest) -> Iterator[Endless]:
    endless = Endless(*request.param)
    thread = threading.Thread(target=endless.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield endless
    endless.server.shutdown()
    endless.server.server_close()  # waits for the answers on their way
    thread.join(5)
    assert endless.taken
    assert all(taken < _MOST for taken in endless.taken), "the connection was not dropped"


@pytest.mark.parametrize(
    ("endless", "error"),
    [
        ((200, "application/json"), ArtifactMissing),
        ((400, "application/json"), ArtifactMissing),
        ((200, "text/html"), OutcomeUnknown),
        ((504, "text/html"), OutcomeUnknown),
    ],
    indirect=["endless"],
)
def test_no_answer_about_a_file_fills_the_hosts_memory(endless: Endless, error: type[ProviderError]) -> None:
    """A policy that attached 24 MB of names to its artifact had the farm take in a hundred at its submission."""
    sandbox = E2BProvider("e2b_key", api_url=f"http://127.0.0.1:{endless.server.server_port}").create(
        CreateRequest("t-1", "base", 60, allow_internet_access=False)
    )
    with pytest.raises(error, match="more than 1048576 bytes"):
        sandbox.read("/home/user/report.py", limit_bytes=1000, timeout_seconds=30)
