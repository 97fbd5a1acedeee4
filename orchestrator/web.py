"""The orchestrator's HTTP interface: /metrics for Prometheus, /healthz and /readyz for whoever supervises it.

What always holds: an answer comes within _READING_SECONDS, less than Prometheus waits, a probe's within _PING_SECONDS,
less than Kubernetes waits, and none shows a stack trace; when Redis is away, or does not answer in that time, /metrics
says so with a gauge and /readyz, which only pings, fails. Beyond loopback /metrics wants a bearer token, and without
one it answers only requests that name this host, so that no foreign web page reads it through a name of its own. The
probes say nothing worth that, and come under whatever name a supervisor has for this process.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from orchestrator.deadline import Deadline
from orchestrator.exposure import STRANGE_HOST, names_this_host, shows_token
from orchestrator.farm import Farm
from orchestrator.metrics import FarmReading, read, registry_of
from orchestrator.redis_address import without_password

logger = logging.getLogger(__name__)

_READING_SECONDS = 5.0
_PING_SECONDS = 3.0


def create_app(farm: Farm, *, token: str | None = None) -> FastAPI:
    """The application; it reads the farm when it is asked."""
    readings = Deadline(seconds=_READING_SECONDS, places=4)
    pings = Deadline(seconds=_PING_SECONDS, places=4)
    app = FastAPI(title="rollout-farm", docs_url=None, redoc_url=None, openapi_url=None)

    def reading() -> FarmReading | None:
        try:
            return readings.within(lambda: read(farm))
        except (RedisError, OSError) as error:
            logger.warning("not read: %s", without_password(str(error)))
            return None

    # plain functions: FastAPI runs them in threads, so that a slow Redis holds up no other request
    @app.get("/metrics")
    def metrics(request: Request) -> Response:
        if token is None and not names_this_host(request.headers.get("host", "")):
            return PlainTextResponse(STRANGE_HOST, status_code=403)
        if token is not None and not shows_token(request.headers.get("authorization", ""), token):
            return PlainTextResponse(
                "a bearer token is required\n", status_code=401, headers={"WWW-Authenticate": "Bearer"}
            )
        return _encoded(registry_of(reading()), request.headers.get("accept", ""))

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:  # not in a thread: all of those may be waiting for Redis
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    def readyz() -> PlainTextResponse:
        try:
            pings.within(farm.redis.ping)
        except (RedisError, OSError) as error:
            logger.warning("not ready: %s", without_password(str(error)))
            return PlainTextResponse("the farm's Redis does not answer\n", status_code=503)
        return PlainTextResponse("ok\n")

    return app


def _encoded(registry: Collector, accept: str) -> Response:
    """In the format that is asked for; in the plain one for who asks for something that nobody can read."""
    try:
        return _as(accept, registry)
    except (TypeError, ValueError):  # a version that is no number was compared with one
        return _as("", registry)


def _as(accept: str, registry: Collector) -> Response:
    encode, content_type = choose_encoder(accept)
    return Response(encode(registry), headers={"Content-Type": content_type})
