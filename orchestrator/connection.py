"""Connections to the farm's Redis: text for our own keys, bytes for RQ. The one layer that retries a Redis call.

Every script and write can be repeated with the same id and change nothing, so a call whose answer was lost is sent
again, with backoff, for about ten seconds; after that the error reaches the caller.
"""

from __future__ import annotations

from redis import Redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from orchestrator.errors import RedisUnavailable

BLOCK_SECONDS = 5
"""The longest blocking call; well below the socket timeout, so that a silent server is noticed."""

_SOCKET_SECONDS = 15


def connect(url: str, *, text: bool = True) -> Redis:
    """A client of the farm's Redis that has answered once; `text=False` is what RQ needs.

    Raises RedisUnavailable at once when the server cannot be reached or refuses us.
    """
    try:
        with Redis.from_url(url, socket_connect_timeout=3, socket_timeout=3, retry=None) as first:
            first.ping()
    except (RedisError, ValueError, OSError) as error:
        raise RedisUnavailable(
            f"no Redis at {_without_password(url)} ({error}); start one, or correct REDIS_URL, "
            "or unset it to use the embedded server"
        ) from error
    return client(url, text=text)


def client(url: str, *, text: bool = True) -> Redis:
    """The same client without asking first: makes no request, so it may be built before a fork."""
    keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
    return Redis.from_url(
        url,
        decode_responses=text,
        socket_connect_timeout=5,
        socket_timeout=_SOCKET_SECONDS,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=2), 9),
        retry_on_error=[RedisConnectionError, RedisTimeoutError, BusyLoadingError],
        **keepalive,
    )


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://***@{tail}" if at else url
