"""The Terminus server: OpenEnv's HTTP and WebSocket routes over our environment, with a fixed number of places.

Always holds: what the server created it tries to delete, whether a session is closed, its client vanishes, or the
server is told to stop; what could not be deleted is listed at GET /teardown-failures. OpenEnv's stateless /reset,
/step and /state are left out: each would make a session outside the places and close it at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import HTTPEnvServer  # type: ignore[import-untyped]
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation  # type: ignore[import-untyped]
from openenv.core.env_server.types import ConcurrencyConfig, ServerMode  # type: ignore[import-untyped]

from orchestrator.exposure import check_exposure
from orchestrator.listener import base_url, listen
from orchestrator.provider import Provider
from orchestrator.settings import Budgets
from workers.terminus.access import BearerToken
from workers.terminus.attachments import AttachedSessions, over_websocket
from workers.terminus.environment import TerminusEnvironment
from workers.terminus.session import SessionDefaults, TerminusState
from workers.terminus.teardown import TeardownFailures

logger = logging.getLogger(__name__)

_UNATTACHED_SECONDS = 300.0
"""An HTTP-made session without a WebSocket and without a call for so long is given up; one with a WebSocket never."""

_STATELESS = {"/reset", "/step", "/state"}
"""Removed after registration: OpenEnv's production mode leaves them out too, but costs 0.7 s and 17 MB of imports."""

_GRACE_SECONDS = 1.0
"""What a stopping server gives open connections before it cancels them; sandboxes are deleted after that."""


class _Sessions(HTTPEnvServer):  # type: ignore[misc]
    """OpenEnv's, whose reaper would take a session that a WebSocket made for one that nobody is attached to."""

    async def _create_session(self) -> tuple[str, Any]:
        session_id, environment = await super()._create_session()
        if over_websocket():
            self._session_websocket_attachments.add(session_id)  # it ends with its WebSocket, however long that is idle
        return session_id, environment


class _Environments:
    """The environments of one server: some ready for the next session, and those not closed yet. Thread-safe.

    Building one costs 5 ms (FastMCP). So that no reset waits for it, they are built at the start and after a close.
    """

    def __init__(self, build: Callable[[], TerminusEnvironment], *, spare: int) -> None:
        self._build = build
        self._open: set[TerminusEnvironment] = set()
        self._spare = [build() for _ in range(spare)]
        self._most_spare = spare
        self._lock = threading.Lock()

    def take(self) -> TerminusEnvironment:
        """One for a new session."""
        with self._lock:
            ready = self._spare.pop() if self._spare else None
        taken = ready if ready is not None else self._build()
        with self._lock:
            self._open.add(taken)
        return taken

    def closed(self, environment: TerminusEnvironment) -> None:
        """Forget a closed one; the first time, prepare another."""
        with self._lock:
            known = environment in self._open
            self._open.discard(environment)
            wanted = known and len(self._spare) < self._most_spare
        if wanted:
            ready = self._build()
            with self._lock:
                self._spare.append(ready)

    def close_all(self) -> None:
        """Close every session, side by side: each deletion is one attempt, bounded by the provider."""
        with self._lock:
            remaining = list(self._open)
            self._most_spare = 0
        if not remaining:
            return
        with ThreadPoolExecutor(max_workers=len(remaining)) as pool:
            list(pool.map(TerminusEnvironment.close, remaining))


def create_app(
    provider: Provider,
    budgets: Budgets,
    *,
    max_sessions: int = 2,
    defaults: SessionDefaults | None = None,
    token: str | None = None,
    vanished_seconds: float = 2.0,
    unattached_seconds: float = _UNATTACHED_SECONDS,
) -> FastAPI:
    """The server's application; `vanished_seconds` is how long a session outlives its client's last WebSocket.

    One that was made over HTTP and never had any is given up, and its place free, `unattached_seconds` after its last
    call.
    """
    teardowns = TeardownFailures()

    def build() -> TerminusEnvironment:
        return TerminusEnvironment(
            provider,
            budgets,
            teardowns,
            defaults=defaults,
            on_closed=lambda environment: environments.closed(environment),
        )

    environments = _Environments(build, spare=max_sessions)
    app = FastAPI(title="Terminus")
    _Sessions(
        environments.take,
        CallToolAction,
        CallToolObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=unattached_seconds),
        env_name="terminus_env",
        state_cls=TerminusState,
    ).register_routes(app, mode=ServerMode.SIMULATION)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in _STATELESS]

    @app.get("/teardown-failures")
    def teardown_failures() -> list[dict[str, Any]]:
        """Sandboxes whose deletion failed, oldest first."""
        return teardowns.rows()

    async def stop() -> None:
        await asyncio.to_thread(environments.close_all)

    app.router.on_shutdown.append(stop)
    app.add_middleware(AttachedSessions, grace_seconds=vanished_seconds)
    if token is not None:
        app.add_middleware(BearerToken, token=token)
    return app


def serve(
    provider: Provider,
    budgets: Budgets,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    listener: socket.socket | None = None,
    ready: Callable[[str], None] | None = None,
    token: str | None = None,
    **options: Any,
) -> None:
    """Serve until SIGTERM or SIGINT, then close every session; `ready` gets the base URL once requests are answered.

    `listener` is a bound socket to serve on instead of `host` and `port`: whoever owns it can restart the server at
    the same address. `options` are those of `create_app`. A host beyond loopback without a token is a SettingsError, as
    is an address that cannot be had.
    """
    if listener is not None:
        host = listener.getsockname()[0]
    check_exposure(host, token, setting="FARM_TERMINUS_TOKEN")
    app = create_app(provider, budgets, token=token, **options)
    listener = listener if listener is not None else listen(host, port)
    config = uvicorn.Config(
        app,
        loop="asyncio",  # uvloop leaks descriptors into children
        ws_per_message_deflate=False,  # both ends are on one host
        log_level="warning",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=max(1, round(_GRACE_SECONDS)),
    )
    announce = partial(ready, base_url(listener)) if ready is not None else None
    with listener:
        _Server(config, announce).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, announce: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._announce is not None and not self.should_exit:
            self._announce()
