"""The service as a whole: its settings, its application, and running it on the loopback.

Every request passes through one place, `Service.__call__`, before it reaches the control plane or a sandbox: there
creation attempts are logged and faults are injected, when some are set.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from orchestrator.exposure import is_loopback
from orchestrator.listener import base_url, listen
from workers.e2b_local.asgi import Receive, Scope, Send
from workers.e2b_local.attempts import Attempts
from workers.e2b_local.capability import open_jail, probe
from workers.e2b_local.control import Control, Offer
from workers.e2b_local.events import EventLog
from workers.e2b_local.injection import Injector, is_creation
from workers.e2b_local.jail import Limits
from workers.e2b_local.listening import Connection, Listening
from workers.e2b_local.proxy import Proxy
from workers.e2b_local.sandboxes import Registry
from workers.e2b_local.stage import unstage

logger = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 600
_LAST_REQUESTS_SECONDS = 5
_RUN_PREFIX = "run-"
_DESCRIPTORS = 65_536  # a sandbox takes up to ten, and some systems start us with leave for 1024
_LEAST_MEMORY_MB = 64


@dataclass(frozen=True)
class ServiceConfig:
    """Where the service listens, who may use it, and what one sandbox may use. Sizes are in MiB."""

    api_key: str
    root: Path  # of this service alone; holds a few hundred KB while it runs
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    max_sandboxes: int = 500
    memory_mb: int = 512  # address space of each process
    vcpus: int = 2  # told to clients; nothing holds a sandbox to it
    process_limit: int = 256
    file_limit_mb: int = 256
    home_mb: int = 512
    tmp_mb: int = 256
    templates: tuple[str, ...] = ("base",)
    bwrap: Path | None = None  # None: find one
    python: Path | None = None  # for the sandboxes; None: the system's, otherwise our own

    def __post_init__(self) -> None:
        if not self.api_key:
            raise ValueError("the local sandbox service needs an api_key")
        if self.memory_mb < _LEAST_MEMORY_MB:
            raise ValueError(f"memory_mb must be at least {_LEAST_MEMORY_MB}: an agent and a shell need it")
        if not is_loopback(self.host):
            message = f"refusing to listen on {self.host}: this is a development backend for the loopback only"
            raise ValueError(f"{message}; use 127.0.0.1, or the E2B cloud for several hosts")

    def limits(self) -> Limits:
        return Limits(self.memory_mb, self.process_limit, self.file_limit_mb, self.home_mb, self.tmp_mb)


class RootInUse(Exception):
    """Another service works in this root directory."""


class Service:
    """The ASGI application. Making it prepares the jails; `close` ends every sandbox and removes its files."""

    def __init__(self, config: ServiceConfig) -> None:
        self._lock: int | None = _claim(config.root)
        self._directory = config.root / f"{_RUN_PREFIX}{os.getpid()}"
        try:
            jail = open_jail(self._directory, config.limits(), bwrap=config.bwrap, python=config.python)
            probe(jail)
        except BaseException:
            self._leave()
            raise
        self.log = EventLog()
        self.registry = Registry(jail, self.log)
        self.attempts = Attempts()
        self._proxy = Proxy(self.registry)
        self.injector = Injector(self.registry, self.log, self._proxy.addressee)
        self._control = Control(_offer(config), self.registry, self.log, self.attempts, self.injector)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif is_creation(scope):
            await self.attempts.watch(self._disturbed, scope, receive, send)
        else:
            await self._disturbed(scope, receive, send)

    async def _disturbed(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.injector.apply(self._answer, scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if sandbox_id := self._proxy.addressee(scope):
            await self._proxy.forward(sandbox_id, scope, receive, send)
        else:
            await self._control.handle(scope, receive, send)

    async def close(self) -> None:
        await self.registry.close()
        self._leave()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _leave(self) -> None:
        unstage(self._directory)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def create_app(config: ServiceConfig) -> Service:
    """The application; raises JailUnavailable, RootInUse."""
    return Service(config)


def serve(config: ServiceConfig, *, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then end every sandbox; `ready` is given the base URL once it listens.

    Raises JailUnavailable, RootInUse, and SettingsError when the address cannot be had.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with listen(config.host, config.port) as listener:
        asyncio.run(_serve(create_app(config), listener, ready))


async def _serve(service: Service, listener: socket.socket, ready: Callable[[str], None] | None) -> None:
    settings = uvicorn.Config(
        service,
        # uvloop leaks descriptors into the jails.
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_LAST_REQUESTS_SECONDS,
    )
    server = _Server(settings, service, ready)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: our starter handles signals
            loop.add_signal_handler(number, server.stop)
    try:
        await server.serve(sockets=[listener])
    finally:
        await service.close()


class _Server(Listening):
    """Ends the sandboxes before it waits for open requests: those of a sandbox end with it."""

    def __init__(self, settings: uvicorn.Config, service: Service, ready: Callable[[str], None] | None) -> None:
        super().__init__(settings)
        self._service = service
        self._ready = ready
        service.injector.outage = self.refuse
        logging.getLogger("uvicorn.error").addFilter(_is_news)

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready and self.servers:
            self._ready(base_url(self.servers[0].sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.stop_listening()
        await self._service.registry.close()
        await super().shutdown(sockets)


def _is_news(record: logging.LogRecord) -> bool:
    """A sandbox's end breaks its responses off on purpose; uvicorn calls that an error."""
    return "without completing response" not in record.getMessage()


def _offer(config: ServiceConfig) -> Offer:
    disk_mb = config.home_mb + config.tmp_mb
    return Offer(config.api_key, config.templates, config.max_sandboxes, config.vcpus, config.memory_mb, disk_mb)


def _claim(root: Path) -> int:
    """Lock the root and sweep out what a killed service left; its jails ended with it."""
    root.mkdir(parents=True, exist_ok=True)
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RootInUse(f"another local sandbox service uses {root}: stop it, or choose another root") from None
    for stale in root.glob(f"{_RUN_PREFIX}*"):
        unstage(stale)
    return lock
