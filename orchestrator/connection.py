"""Connections to the farm's Redis: text for our own keys, bytes for RQ. The one layer that retries a Redis call.

Rows, leases, permits, creations, receipts and actions can be written again with the same id and change nothing, so a
call whose answer was lost is sent again, with backoff; where the connection is refused that lasts about ten seconds,
then the error reaches the caller. Two writes are not of that kind: entries of a transcript may stand there twice, and
one lost job may be counted as two, so that an episode is given up one loss sooner.
What is done again in a moment anyway (heartbeats, rounds, farewells) takes an impatient client: one attempt, so that
an outage is seen when it is there. A trainer waits out an outage once, not again for each of its many episodes: see
`Patience`.

A server that is gone, read-only or was just demoted is an outage like any other, so that the same retry crosses a
failover: where an address moves to another server behind our back, and with Sentinels, whom every new connection asks
who the primary is.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from redis import Redis
from redis.backoff import AbstractBackoff, ExponentialWithJitterBackoff, NoBackoff
from redis.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import BusyLoadingError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from orchestrator.errors import RedisUnavailable
from orchestrator.redis_address import RedisAddress, parse_address
from orchestrator.redis_trouble import diagnose
from orchestrator.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")

BLOCK_SECONDS = 5
"""The longest blocking call; well below the socket timeout, so that a silent server is noticed."""

SILENT_SECONDS = 15

_RETRIES = 9
"""With the backoff below, about ten seconds where the connection is refused."""

_MANY = 100_000
"""Connections of one client: each thread that waits for an episode holds one. redis-py allows a hundred, and one more
fails at once instead of waiting; the trainer's heartbeat would be that one."""

_SENTINEL_SECONDS = 2.0
"""Sentinels are asked one after another; one that is silent for longer is passed over."""

_RECHECK_SECONDS = 1.0
_SENTINELS_AWAY_SECONDS = 30.0
"""How often a living connection asks them; less often while none of them answers."""

_NO_PRIMARY = ("UNBLOCKED", "NOREPLICAS")
"""What a server says that is demoted while we wait, or that has lost its replicas (min-replicas-to-write)."""

_TRANSIENT = [RedisConnectionError, RedisTimeoutError, BusyLoadingError]


def require_answer(settings: Settings) -> None:
    """Raise RedisUnavailable at once when the farm's Redis cannot be reached or refuses us."""
    try:
        with client(settings, patient=False, answer_seconds=3) as first:
            first.ping()
    except (RedisError, OSError) as error:
        raise RedisUnavailable(str(diagnose(error, settings.redis_url or ""))) from error


def client(
    settings: Settings, *, text: bool = True, patient: bool = True, answer_seconds: float = SILENT_SECONDS
) -> Redis:
    """A client of the farm's Redis; `text=False` is what RQ needs. Makes no request, so it may precede a fork.

    Raises RedisUnavailable when REDIS_URL is not the address of a Redis.
    """
    try:
        address = parse_address(settings.redis_url or "")
    except ValueError as error:
        raise RedisUnavailable(
            f"REDIS_URL is not the address of a Redis: {error}; correct it: REDIS_URL=redis://user:password@host:6379/0"
        ) from None
    tls = {**_tls_files(settings), **address.tls_options} if address.tls else {}
    options = {
        **address.credentials,
        **tls,
        "db": address.db,
        "decode_responses": text,
        "socket_connect_timeout": min(5, answer_seconds),
        "socket_timeout": answer_seconds,
        "retry": Retry(_backoff(), _RETRIES) if patient else _once(),
        "retry_on_error": _TRANSIENT if patient else [],
        "max_connections": _MANY,
        "driver_info": None,  # finding out its own version costs redis-py 4 ms a connection
    }
    return Redis.from_pool(_pool(address, options, tls))


class Patience(Retry):
    """What the clients of one process share of an outage: once it has outlasted all tries of a call, every further
    call is one attempt, until one gets through.
    """

    def __init__(self, backoff: AbstractBackoff | None = None) -> None:
        super().__init__(backoff or _backoff(), _RETRIES, supported_errors=tuple(_TRANSIENT))
        self._away = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Patience:
        """Itself: redis-py gives each connection a copy."""
        return self

    def shared_by(self, *clients: Redis) -> None:
        """From here on these clients have it."""
        for each in clients:
            each.set_retry(self)

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,  # noqa: FBT001, FBT002 - redis-py's signature
    ) -> T:
        """As redis-py's, but for what others have found out meanwhile."""

        def failed(error: Exception, *count: int) -> None:
            fail(error, *count)
            if self._away:
                raise error

        try:
            result = super().call_with_retry(do, failed, is_retryable, with_failure_count)
        except self._supported_errors:
            self._away = True
            raise
        if with_failure_count:  # a command's; that it connects proves nothing of a server that loads or was demoted
            self._away = False
        return result


def make_impatient(redis: Redis) -> None:
    """From here on this client makes one attempt a call: its process is leaving."""
    redis.set_retry(_once())


def redis_border(method: Callable[P, T]) -> Callable[P, T]:
    """A public call of the trainer's side: what Redis fails with leaves it as RedisUnavailable."""

    @wraps(method)
    def translated(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except RedisError as error:
            raise RedisUnavailable(
                f"Redis failed on the way: {diagnose(error)}; nothing submitted is lost while its data is kept: ask "
                "again when it is back"
            ) from error

    return translated


def _backoff() -> AbstractBackoff:
    return ExponentialWithJitterBackoff(base=0.05, cap=2)


def _once() -> Retry:
    return Retry(NoBackoff(), 0)


def _keepalive() -> dict[int, int]:
    """Soon enough that no router forgets an idle connection; where this system cannot be told, its own times stand."""
    names = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    return {getattr(socket, name): value for name, value in names.items() if hasattr(socket, name)}


def _tls_files(settings: Settings) -> dict[str, str]:
    files = {
        "ssl_ca_certs": settings.redis_ca_file,
        "ssl_certfile": settings.redis_certificate_file,
        "ssl_keyfile": settings.redis_key_file,
    }
    return {name: str(path) for name, path in files.items() if path is not None}


def _pool(address: RedisAddress, options: dict[str, Any], tls: dict[str, Any]) -> ConnectionPool:
    if address.path:
        return ConnectionPool(connection_class=_SocketConnection, path=address.path, **options)
    options |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    if not address.master:
        kind: type[AbstractConnection] = _TlsConnection if address.tls else _TcpConnection
        host, port = address.nodes[0]
        return ConnectionPool(connection_class=kind, host=host, port=port, **options)
    seconds = min(_SENTINEL_SECONDS, options["socket_timeout"])
    sentinels = _Sentinels(  # type: ignore[no-untyped-call]
        address.nodes,
        sentinel_kwargs={
            **address.sentinel_credentials,
            **({"ssl": True, **tls} if address.tls else {}),
            "socket_connect_timeout": seconds,
            "socket_timeout": seconds,
            "retry": _once(),
            "decode_responses": True,
        },
    )
    managed = _PrimarySSLConnection if address.tls else _PrimaryConnection
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        address.master, sentinels, connection_class=managed, **options
    )


class _Sentinels(Sentinel):
    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Where the primary is; when none of us answers, the error's cause says why, which redis-py keeps as text."""
        try:
            found: tuple[str, int] = super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError as error:
            try:
                self.sentinels[0].ping()
            except RedisError as cause:
                raise error from cause
            raise
        return found


class _FromPrimary(AbstractConnection):
    """Takes its server's demotion for a lost connection: the next one may lead to the new primary."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        """The answer; that we were blocked on a server while it was demoted is none, nor that it has no replica."""
        # Redis-py disconnects after an error, but not with Sentinels: there a read that a signal ends would leave its
        # answer to the next command.
        options.setdefault("disconnect_on_error", True)
        try:
            return super().read_response(*args, **options)
        except ResponseError as error:
            # a code that redis-py does not know stays in the text
            if not isinstance(error, ReadOnlyError) and not str(error).startswith(_NO_PRIMARY):
                raise
            self.disconnect()  # type: ignore[no-untyped-call]
            raise RedisConnectionError(f"no primary any more: {error}") from error


class _TcpConnection(_FromPrimary, Connection):
    pass


class _TlsConnection(_FromPrimary, SSLConnection):
    pass


class _SocketConnection(_FromPrimary, UnixDomainSocketConnection):
    pass


class _ToPrimary(_FromPrimary, SentinelManagedConnection):
    """Goes where the Sentinels point.

    A primary that is replaced while it lives goes on taking writes for some ten seconds, which are lost then. So a
    connection in use asks the Sentinels again every second.
    """

    _ask_again = 0.0

    def send_packed_command(self, *args: Any, **options: Any) -> None:
        """Send it to the primary; redis-py alone would reconnect to the server that was lost, again and again."""
        if self.is_connected and time.monotonic() > self._ask_again:
            self._leave_if_replaced()
        if not self.is_connected:
            self._ask_again = time.monotonic() + _RECHECK_SECONDS
            self.connect()  # type: ignore[no-untyped-call]
        super().send_packed_command(*args, **options)  # type: ignore[no-untyped-call]

    def _leave_if_replaced(self) -> None:
        self._ask_again = time.monotonic() + _SENTINELS_AWAY_SECONDS
        try:
            primary = self.connection_pool.get_master_address()
        except RedisError:
            return
        self._ask_again = time.monotonic() + _RECHECK_SECONDS
        if primary != (self.host, self.port):
            self.disconnect()  # type: ignore[no-untyped-call]


class _PrimaryConnection(_ToPrimary):
    pass


class _PrimarySSLConnection(_ToPrimary, SentinelManagedSSLConnection):
    pass
