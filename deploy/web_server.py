"""An HTTP server in a thread of this process, for as long as a block lasts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from orchestrator.errors import SettingsError

_END_SECONDS = 5
"""How long requests that are being answered may take at the end."""


@contextmanager
def serving(app: FastAPI, host: str, port: int) -> Iterator[str]:
    """Serve; the URL. Port 0 takes a free one. Raises SettingsError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where a socket names its protocol: else 40 ms an answer on a kept connection
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise SettingsError(f"{host}:{port} cannot be listened on ({error.strerror}); choose another") from None
        listener.listen()
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=_END_SECONDS, lifespan="off"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), name="web", daemon=True)
        thread.start()
        try:
            shown = f"[{host}]" if family is socket.AF_INET6 else host
            yield f"http://{shown}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(2 * _END_SECONDS)
