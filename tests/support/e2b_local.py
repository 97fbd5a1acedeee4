"""The local sandbox service in a process of its own, and clients for it.

Test modules say `pytest_plugins = ["tests.support.e2b_local"]` and ask for `service`: one is started for the session.
PYTEST_DONT_REWRITE: those modules import this one before pytest learns that it is a plugin.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import E2B, Sandbox

from orchestrator.provider import CreateRequest, Provider
from tests.support.processes import ROOT
from workers.e2b_local.service import ServiceConfig, serve
from workers.sandboxes.provider import E2BProvider

API_KEY = "e2b_" + "5" * 40
_START_SECONDS = 30.0
_STOP_SECONDS = 15.0
# Small enough that reaching a limit takes no time, large enough for any ordinary test.
SMALL = {"process_limit": 64, "file_limit_mb": 48, "home_mb": 96, "tmp_mb": 32, "memory_mb": 512}


@dataclass(frozen=True)
class LocalService:
    """A running service."""

    url: str
    root: Path
    process: subprocess.Popen[str]

    def client(self, api_key: str = API_KEY) -> E2B:
        return E2B(api_url=self.url, sandbox_url=self.url, api_key=api_key, retries=0)

    def create(self, **options: Any) -> Sandbox:
        return self.client().Sandbox.create(**{"timeout": 60, "request_timeout": 10, **options})

    def events(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.call("GET", "/admin/events").json()
        return rows

    def events_of(self, sandbox_id: str) -> list[str]:
        return [row["event"] for row in self.events() if row["sandbox_id"] == sandbox_id]

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request to the control plane that the SDK would not make."""
        headers = {"X-API-KEY": API_KEY, **options.pop("headers", {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=10, **options)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(_STOP_SECONDS)


@contextlib.contextmanager
def running_service(root: Path, **settings: Any) -> Iterator[LocalService]:
    """A service of its own, which is stopped at the end."""
    command = [sys.executable, "-m", "tests.support.e2b_local", str(root), json.dumps({**SMALL, **settings})]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "SECRET_OF_THE_HOST": "hunter2"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "the service did not start"
            yield LocalService(url, root, process)
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            process.stdout.close()
    assert jails_of(root) == [], "the service left sandboxes behind"


def jails_of(root: Path) -> list[str]:
    return [path.name for path in root.glob("run-*")]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with running_service(tmp_path_factory.mktemp("e2b") / "root") as running:
        yield running


@pytest.fixture(scope="session")
def provider(service: LocalService) -> Provider:
    """Our own provider on the session's service."""
    return E2BProvider(API_KEY, api_url=service.url)


def sandbox_request(**changes: Any) -> CreateRequest:
    """A create request under a fresh allocation id."""
    given: dict[str, Any] = {
        "allocation_id": f"t-{uuid.uuid4().hex}",
        "template": "base",
        "lifetime_seconds": 120,
        "allow_internet_access": False,
        "metadata": {"farm": "test"},
        "envs": {"COLOUR": "blue"},
    }
    return CreateRequest(**{**given, **changes})


@pytest.fixture
def sandbox(service: LocalService) -> Iterator[Sandbox]:
    box = service.create()
    yield box
    box.kill()


def _main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[2])
    settings |= {name: Path(settings[name]) for name in ("python", "bwrap") if name in settings}
    config = ServiceConfig(api_key=API_KEY, root=Path(sys.argv[1]), **settings)
    serve(config, ready=_announce)


def _announce(url: str) -> None:
    os.write(1, f"{url}\n".encode())


if __name__ == "__main__":
    _main()
