"""Terminus servers to test with: in a thread over any provider, or in a process of their own over a sandbox service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from orchestrator.provider import Provider
from orchestrator.settings import Budgets
from tests.support.forge import forged
from tests.support.waiting import wait_until
from tests.support.warm import WarmProcess
from workers.sandboxes.provider import E2BProvider
from workers.terminus.server import create_app, serve
from workers.terminus.session import SessionDefaults


@contextmanager
def serving(provider: Provider, budgets: Budgets, **options: Any) -> Iterator[str]:
    """The application in a thread of this process; its base URL."""
    app = create_app(provider, budgets, **options)
    server = uvicorn.Server(uvicorn.Config(app, port=0, loop="asyncio", log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, description="the server listens")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive()


@contextmanager
def terminus_server(
    url: str,
    budgets: Budgets,
    *,
    key: str,
    metadata: Mapping[str, str] | None = None,
    vanished_seconds: float = 2.0,
) -> Iterator[tuple[str, WarmProcess]]:
    """A server in a process of its own: its base URL and the process.

    `metadata` is on the sandboxes of clients that name none.
    """
    with forged(_serve, key, url, budgets, dict(metadata or {}), vanished_seconds) as started:
        yield started


def _serve(
    tell: Callable[[str], None],
    key: str,
    url: str,
    budgets: Budgets,
    metadata: Mapping[str, str],
    vanished_seconds: float,
) -> None:
    serve(
        E2BProvider(key, api_url=url),
        budgets,
        defaults=SessionDefaults(lifetime_seconds=120, metadata=metadata),
        vanished_seconds=vanished_seconds,
        ready=tell,
    )
