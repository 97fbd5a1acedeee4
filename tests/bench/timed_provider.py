"""A provider that notes when each call began and ended; what it calls is the real one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.provider import CommandResult, CreateRequest, File, Provider, Sandbox, SandboxRow


@dataclass(frozen=True)
class Call:
    """One call to the provider or to a sandbox; unix seconds."""

    name: str
    pid: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


class CallLog:
    """Calls of several processes in one file, one line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """Note the block as one call, also when it raises; costs microseconds."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        began = time.time()
        try:
            yield
        finally:  # one short write to a file opened for appending stays whole
            os.write(self._file, (json.dumps([name, os.getpid(), began, time.time()]) + "\n").encode())

    def calls(self) -> list[Call]:
        """Everything noted so far, by beginning."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return sorted((Call(*json.loads(line)) for line in lines), key=lambda call: call.began)


class TimedProvider:
    """Implements `orchestrator.provider.Provider` over another one."""

    def __init__(self, inner: Provider, log: CallLog) -> None:
        self._inner = inner
        self._log = log

    def create(self, request: CreateRequest) -> Sandbox:
        """Timed; the sandbox it returns is too."""
        with self._log.noted("create"):
            made = self._inner.create(request)
        return _TimedSandbox(made, self._log)

    def prepare(self) -> None:
        """Not timed: it belongs to no episode."""
        self._inner.prepare()

    def attach(self, sandbox_id: str, *, lifetime_seconds: int) -> Sandbox:
        """Timed; the sandbox it returns is too."""
        with self._log.noted("attach"):
            made = self._inner.attach(sandbox_id, lifetime_seconds=lifetime_seconds)
        return _TimedSandbox(made, self._log)

    def delete(self, sandbox_id: str) -> None:
        """Timed."""
        with self._log.noted("delete"):
            self._inner.delete(sandbox_id)

    def describe(self, sandbox_id: str) -> SandboxRow | None:
        """Timed."""
        with self._log.noted("describe"):
            return self._inner.describe(sandbox_id)

    def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
        """Timed."""
        with self._log.noted("list"):
            return self._inner.list(metadata)


class _TimedSandbox:
    def __init__(self, inner: Sandbox, log: CallLog) -> None:
        self._inner = inner
        self._log = log

    @property
    def sandbox_id(self) -> str:
        return self._inner.sandbox_id

    def probe(self) -> None:
        with self._log.noted("probe"):
            self._inner.probe()

    def run(
        self, command: str, *, timeout_seconds: float, output_limit_bytes: int, response_seconds: float
    ) -> CommandResult:
        with self._log.noted("run"):
            return self._inner.run(
                command,
                timeout_seconds=timeout_seconds,
                output_limit_bytes=output_limit_bytes,
                response_seconds=response_seconds,
            )

    def write(self, path: str, data: bytes, *, timeout_seconds: float) -> None:
        with self._log.noted("write"):
            self._inner.write(path, data, timeout_seconds=timeout_seconds)

    def read(self, path: str, *, limit_bytes: int, timeout_seconds: float) -> File:
        with self._log.noted("read"):
            return self._inner.read(path, limit_bytes=limit_bytes, timeout_seconds=timeout_seconds)
