"""Connections to the farm's Redis: text for our own keys, bytes for RQ. The one layer that retries a Redis call.

Rows, leases, permits, creations, receipts and actions can be written again with the same id and change nothing, so a
call whose answer was lost is sent again, with backoff; where the connection is refused that lasts about ten seconds,
then the error reaches the caller. Two writes are not of that kind, and err on the careful side: a 429 to a call that
creates nothing has no id and may be counted twice (`report_limited`), entries of a transcript may stand there twice.
What is done again in a moment anyway (heartbeats, rounds, farewells) takes an impatient client: one attempt, so that
an outage is seen when it is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from redis import Redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from orchestrator.errors import RedisUnavailable

P = ParamSpec("P")
T = TypeVar("T")

BLOCK_SECONDS = 5
"""The longest blocking call; well below the socket timeout, so that a silent server is noticed."""

SILENT_SECONDS = 15


def require_answer(url: str) -> None:
    """Raise RedisUnavailable at once when the farm's Redis cannot be reached or refuses us."""
    try:
        with Redis.from_url(url, socket_connect_timeout=3, socket_timeout=3, retry=_once()) as first:
            first.ping()
    except (RedisError, ValueError, OSError) as error:
        raise RedisUnavailable(
            f"no Redis at {without_password(url)} ({without_password(str(error))}); start one, or correct REDIS_URL, "
            "or unset it to use the embedded server"
        ) from error


def client(url: str, *, text: bool = True, patient: bool = True, answer_seconds: float = SILENT_SECONDS) -> Redis:
    """A client of the farm's Redis; `text=False` is what RQ needs. Makes no request, so it may precede a fork.

    Raises RedisUnavailable when `url` is not the address of a Redis.
    """
    keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
    try:
        return Redis.from_url(
            url,
            decode_responses=text,
            socket_connect_timeout=min(5, answer_seconds),
            socket_timeout=answer_seconds,
            retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=2), 9) if patient else _once(),
            retry_on_error=[RedisConnectionError, RedisTimeoutError, BusyLoadingError] if patient else [],
            driver_info=None,  # finding out its own version costs redis-py 4 ms a connection
            **keepalive,
        )
    except ValueError as error:
        raise RedisUnavailable(
            f"REDIS_URL is not the address of a Redis ({error}); write it like redis://127.0.0.1:6379/0"
        ) from error


def make_impatient(redis: Redis) -> None:
    """From here on this client makes one attempt a call: its process is leaving."""
    redis.set_retry(_once())


def _once() -> Retry:
    return Retry(NoBackoff(), 0)


def redis_border(method: Callable[P, T]) -> Callable[P, T]:
    """A public call of the trainer's side: what Redis fails with leaves it as RedisUnavailable."""

    @wraps(method)
    def translated(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except RedisError as error:
            raise RedisUnavailable(
                f"Redis failed on the way: {without_password(str(error))}; nothing submitted is lost while its data is "
                "kept: ask again when it is back"
            ) from error

    return translated


def without_password(text: str) -> str:
    """`text` with the password of every URL in it hidden."""
    hidden = re.sub(r"(://[^:/@\s]*:)\S*@", r"\1***@", text)
    return re.sub(r"([?&]password=)[^&\s]*", r"\1***", hidden)
