"""The orchestrator's HTTP interface: /metrics for Prometheus, /healthz and /readyz for whoever supervises it.

What always holds: an answer never takes long and never shows a stack trace; when Redis is away /metrics says so with a
gauge, and /readyz fails. Beyond loopback /metrics wants a bearer token; the probes say nothing worth one.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import choose_encoder
from redis.exceptions import RedisError

from orchestrator.metrics import FarmReading, registry_of
from orchestrator.redis_address import without_password

logger = logging.getLogger(__name__)


def create_app(read: Callable[[], FarmReading], *, token: str | None = None) -> FastAPI:
    """The application; `read` looks at the farm, and may raise RedisError."""
    app = FastAPI(title="rollout-farm", docs_url=None, redoc_url=None, openapi_url=None)

    def reading() -> FarmReading | None:
        try:
            return read()
        except (RedisError, OSError) as error:
            logger.warning("not read: %s", without_password(str(error)))
            return None

    # plain functions: FastAPI runs them in threads, so that a slow Redis holds up no other request
    @app.get("/metrics")
    def metrics(request: Request) -> Response:
        if token is not None and not _shows(request, token):
            return PlainTextResponse(
                "a bearer token is required\n", status_code=401, headers={"WWW-Authenticate": "Bearer"}
            )
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry_of(reading())), headers={"Content-Type": content_type})

    @app.get("/healthz")
    def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    def readyz() -> PlainTextResponse:
        if reading() is None:
            return PlainTextResponse("the farm's Redis does not answer\n", status_code=503)
        return PlainTextResponse("ok\n")

    return app


def _shows(request: Request, token: str) -> bool:
    return hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode())
