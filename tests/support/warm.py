"""Processes of ours that start at once: forked from one that has imported already what they would import.

`rollout-farm` imports for half a second, a worker for two, a trainer for seven, and the suite starts hundreds. A warm
process is as real as any: a pid, a session, an environment, files and an end of its own; it runs the module as
`python -m` does. Two things differ: its command line in /proc is the template's, and what it imports is there. Whether
a command imports what it needs, and what it shows in a list of processes, is for tests that start the real program:
those of tests/e2e do.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tests.support.template import MARK, MARK_LENGTH, Request, body_of

_ROOT = Path(__file__).resolve().parents[2]
FARM_COMMAND = (sys.executable, "-m", "deploy.cli")

_FARM = (
    *("deploy.command_line", "deploy.doctor", "deploy.glance", "deploy.web_server", "deploy.local_farm"),
    *("orchestrator.dashboard.site", "workers.crew", "workers.sandboxes.provider", "workers.e2b_local.service"),
)
_TRAINER = (*_FARM, "trainer.training", "trl.trainer.grpo_trainer")


class WarmProcess:
    """A running warm process; what one asks a `subprocess.Popen`, it answers alike."""

    def __init__(self, args: Sequence[str], told: int) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._told = os.fdopen(told, "r")
        self.pid = int(self._told.readline())

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._end(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutExpired."""
        if (code := self._end(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _end(self, seconds: float | None) -> int | None:
        if self.returncode is None and _readable(self._told.fileno(), seconds):
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode


class Template:
    """Starts warm processes; its own process ends with this one."""

    def __init__(self, *modules: str, options: Sequence[str] = (), **variables: str) -> None:
        self._options = list(options)
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unwanted = ("FARM_", "REDIS_URL", "E2B_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *options, "-m", "tests.support.template", str(theirs.fileno()), *modules],
                env={**kept, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", MARK: "-" * MARK_LENGTH, **variables},
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End the template; what it has started goes on."""
        self._asked.shutdown(socket.SHUT_RDWR)  # a fork of this process may have a copy
        self._asked.close()
        self._process.wait()

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: BinaryIO, stderr: BinaryIO
    ) -> WarmProcess:
        """Start `python -m module arguments` in a session of its own, with nothing to read."""
        start = [sys.executable, *self._options, "-m"]
        assert list(command[: len(start)]) == start, f"{command} is not what this template starts"
        module, *arguments = command[len(start) :]
        reading, writing = os.pipe()
        with Path(os.devnull).open("rb") as nothing:
            descriptors = [nothing.fileno(), stdout.fileno(), stderr.fileno(), writing]
            body = body_of(Request(module, arguments, dict(env), str(cwd)))
            socket.send_fds(self._asked, [body], descriptors)
        os.close(writing)
        return WarmProcess(command, reading)

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end; its output is kept."""
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = self.start(command, env=env, cwd=cwd, stdout=stdout, stderr=stderr)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(process.args, code, stdout.read().decode(), stderr.read().decode())


@functools.cache
def farm() -> Template:
    """For every command that needs neither torch nor the dashboard's page; one a session, when it is first needed."""
    return Template(*_FARM)


@functools.cache
def trainer() -> Template:
    """For commands that train, whose libraries' warnings are let by."""
    return Template(*_TRAINER, options=("-W", "ignore"), HF_HUB_OFFLINE="1")


def _readable(descriptor: int, seconds: float | None) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])
