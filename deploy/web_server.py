"""An HTTP server in a thread of this process, for as long as a block lasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from orchestrator.listener import base_url, listen

_END_SECONDS = 5
"""How long requests that are being answered may take at the end."""


@contextmanager
def serving(app: FastAPI, host: str, port: int) -> Iterator[str]:
    """Serve; the URL. Port 0 takes a free one. Raises SettingsError when the address cannot be had."""
    with listen(host, port) as listener:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=_END_SECONDS, lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="web", daemon=True)
        thread.start()
        try:
            yield base_url(listener)
        finally:
            server.should_exit = True
            thread.join(2 * _END_SECONDS)
