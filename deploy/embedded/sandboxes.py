"""LocalSandboxes: the local E2B-compatible service as a child process of ours, on loopback.

The child is told its API key and directory on its standard input, never in its arguments or environment, and answers
on its standard output with its URL, or with what is wrong with the port. When the input ends, because we stopped it or
died, it deletes its sandboxes and exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.embedded.children import end, last_lines, require_linux, spawn
from orchestrator.errors import ProviderError, SettingsError

_START_SECONDS = 60.0
"""To import its parts and listen; one to two seconds are usual."""
_STOP_SECONDS = 20.0
"""To delete what still runs."""
_ROOT_PREFIX = "sandboxes-"
INSTEAD = "set E2B_API_KEY to run sandboxes on the E2B cloud"


class LocalSandboxes:
    """A local sandbox service with its files in a fresh directory below `directory`."""

    def __init__(self, directory: Path, *, api_key: str, port: int = 0) -> None:
        self._directory = directory.absolute()
        self._api_key = api_key
        self._port = port
        self._root: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self.url = ""

    @property
    def pid(self) -> int | None:
        """The running service's process id."""
        return self._child.pid if self._child and self._child.poll() is None else None

    @property
    def log(self) -> Path:
        """What the service wrote to its standard error."""
        return self._directory / "sandboxes.log"

    def start(self) -> None:
        """Start the service and wait until it listens; nothing when it runs already."""
        if self.pid is not None:
            return
        require_linux("the local sandbox service", INSTEAD)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for abandoned in self._directory.glob(f"{_ROOT_PREFIX}*"):
            with contextlib.suppress(OSError):
                abandoned.rmdir()  # of a killed parent: its service emptied it when it ended
        self._root = Path(tempfile.mkdtemp(prefix=_ROOT_PREFIX, dir=self._directory))
        self.log.write_bytes(b"")
        order = {
            "parent": os.getpid(),
            "api_key": self._api_key,
            "root": str(self._root),
            "port": self._port,
        }
        try:
            self._child = spawn([sys.executable, "-P", "-m", "deploy.embedded.sandbox_child"], log=self.log, pipes=True)
            self.url = self._hand_over(self._child, json.dumps(order))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Let the service delete its sandboxes and end. Does nothing in a forked copy of this process."""
        if self._owner != os.getpid():
            return
        if self._child is not None:
            end(self._child, seconds=_STOP_SECONDS)
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()
            self._child = None
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def check(self) -> None:
        """Raise ProviderError when the service has ended by itself."""
        if self._child is not None and (code := self._child.poll()) is not None:
            raise ProviderError(f"the local sandbox service ended with code {code}:\n{last_lines(self.log)}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _hand_over(self, child: subprocess.Popen[bytes], order: str) -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended already: its log says why
            child.stdin.write(order.encode() + b"\n")
            child.stdin.flush()
        answer = _read_line(child.stdout.fileno(), time.monotonic() + _START_SECONDS)
        if answer is not None and answer.startswith(b"{"):
            said = json.loads(answer)
            if "refused" in said:
                raise SettingsError(said["refused"])
            return str(said["url"])
        reason = "did not start in time" if child.poll() is None and answer is None else "ended while starting"
        raise ProviderError(
            f"the local sandbox service {reason}:\n{last_lines(self.log)}\nmend what it says, or {INSTEAD}"
        )


def _read_line(descriptor: int, deadline: float) -> bytes | None:
    """One line; what there was when the other side closed; None when time ran out."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        chunk = os.read(descriptor, 4096)
        if not chunk:
            break
        line += chunk
    return line
