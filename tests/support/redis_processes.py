"""Redis servers and Sentinels as processes of their own, on loopback ports, set up as a test says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

from deploy.embedded import redis_binary
from deploy.embedded.children import last_lines, leashed, spawn
from tests.support.waiting import wait_until


class RedisProcess:
    """A server that keeps its data in `directory`; `settings` are further lines of its configuration."""

    def __init__(self, directory: Path, settings: Sequence[str] = (), *, sentinel: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = _free_port()
        self.log = directory / "log"
        self._sentinel = sentinel
        self._configuration = directory / "redis.conf"
        durable = () if sentinel else ("save ''", "appendonly yes", "appendfsync no")
        lines = ("bind 127.0.0.1", f"port {self.port}", f"dir {directory}", *durable, *settings)
        self._configuration.write_text("".join(f"{line}\n" for line in lines))
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers, be it with a refusal."""
        command = leashed(redis_binary(), str(self._configuration), *(["--sentinel"] if self._sentinel else []))
        self._child = spawn(command, log=self.log)
        wait_until(self._answers, description=f"the server answers; its log:\n{last_lines(self.log)}")

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP freezes it, SIGCONT lets it go on."""
        if self._child is not None:
            os.kill(self._child.pid, number)

    def kill(self) -> None:
        """SIGKILL, as a crash would; nothing when it does not run."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def client(self, **options: object) -> Redis:
        """A client that gives up at once."""
        return Redis(host="127.0.0.1", port=self.port, decode_responses=True, socket_timeout=5, **options)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            try:
                probe.connect(("127.0.0.1", self.port))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False


class Replicated:
    """A primary, a replica and three Sentinels that call them `farm`; whom they hold for dead is replaced."""

    NAME = "farm"

    def __init__(self, directory: Path, *, down_after_ms: int = 1000, settings: Sequence[str] = ()) -> None:
        self.servers = [RedisProcess(directory / f"server-{n}", settings) for n in (1, 2)]
        self.sentinels: list[RedisProcess] = []
        self._directory = directory
        self._down_after_ms = down_after_ms

    @property
    def url(self) -> str:
        """What REDIS_URL says."""
        nodes = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{nodes}/{self.NAME}"

    def primary(self) -> RedisProcess:
        """The server that the Sentinels name now."""
        port = self._named()
        return next(server for server in self.servers if server.port == port)

    def wait_failover(self, old: RedisProcess, seconds: float = 30) -> None:
        """Until the Sentinels name another server than `old`."""
        wait_until(lambda: self._named() not in (None, old.port), description="a new primary", seconds=seconds)

    def wait_replica(self, seconds: float = 30) -> None:
        """Until the primary has a replica that is up to date, and the Sentinels know it and each other."""

        def ready() -> bool:
            try:
                with self.primary().client() as redis:
                    replica = redis.info("replication").get("slave0")
                for sentinel in self.sentinels:
                    with sentinel.client() as asked:
                        state = asked.sentinel_masters()[self.NAME]
                    if (state["num-slaves"], state["num-other-sentinels"]) != (1, 2) or state["is_sdown"]:
                        return False
            except (RedisError, StopIteration, KeyError):
                return False
            return isinstance(replica, dict) and replica["state"] == "online"

        wait_until(ready, description="a replica in step", seconds=seconds)

    def __enter__(self) -> Self:
        primary, replica = self.servers
        primary.start()
        replica.start()
        with replica.client() as redis:
            redis.replicaof("127.0.0.1", primary.port)
        for number in (1, 2, 3):
            lines = (
                f"sentinel monitor {self.NAME} 127.0.0.1 {primary.port} 2",
                f"sentinel down-after-milliseconds {self.NAME} {self._down_after_ms}",
                f"sentinel failover-timeout {self.NAME} 5000",
            )
            sentinel = RedisProcess(self._directory / f"sentinel-{number}", lines, sentinel=True)
            self.sentinels.append(sentinel)
            sentinel.start()
        self.wait_replica()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.sentinels, *self.servers):
            process.signal(signal.SIGCONT)
            process.kill()

    def _named(self) -> int | None:
        for sentinel in self.sentinels:
            try:
                with sentinel.client() as redis:
                    found = redis.sentinel_get_master_addr_by_name(self.NAME)
            except RedisError:
                continue
            if found:
                return int(found[1])
        return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
