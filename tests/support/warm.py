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
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tests.support.template import MARK, MARK_LENGTH, NUMBER_BYTES, Request, ask

_ROOT = Path(__file__).resolve().parents[2]
FARM_COMMAND = (sys.executable, "-m", "deploy.cli")

SHARED = "TEST_TEMPLATES"
"""The environment variable with the directory of the suite's stages."""

SUITE_STAGES = ("farm", "trainer", "suite")

# A worker keeps gradio out of its process: the dashboard's stage stands alone.
_STAGES = {
    "farm": (
        *("deploy.command_line", "deploy.doctor", "deploy.glance", "deploy.web_server", "deploy.local_farm"),
        *("orchestrator.dashboard.site", "workers.crew", "workers.sandboxes.provider", "workers.e2b_local.service"),
        *("openenv.core.generic_client", "openenv.core.mcp_client"),
    ),
    "trainer": ("trainer.training", "trl.trainer.grpo_trainer"),
    "suite": ("trainer.async_grpo", "playwright.sync_api", "openai"),
    "dashboard": ("orchestrator.dashboard.page", "deploy.command_line", "deploy.web_server"),
}
_BEFORE = {"trainer": ("farm",)}
_ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


class WarmProcess:
    """A running warm process; what one asks a `subprocess.Popen`, it answers alike."""

    def __init__(self, args: Sequence[str], told: socket.socket) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._told = told
        self.pid = int(self._told.recv(NUMBER_BYTES))

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
            self.returncode = int(self._told.recv(NUMBER_BYTES))
            self._told.close()
        return self.returncode


class Template:
    """Starts warm processes: asks the stage that listens at a socket."""

    def __init__(self, socket: Path, *, ignore_warnings: bool = False) -> None:
        self._socket = str(socket)
        self._ignore_warnings = ignore_warnings
        self._start = [sys.executable, *(["-W", "ignore"] if ignore_warnings else []), "-m"]
        self.farm_command = (*self._start, "deploy.cli")

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: BinaryIO,
        stderr: BinaryIO,
        stdin: BinaryIO | None = None,
    ) -> WarmProcess:
        """Start `python -m module arguments` in a session of its own; without stdin it has nothing to read."""
        start, (module, *arguments) = list(command[: len(self._start)]), command[len(self._start) :]
        assert start == self._start, f"{command} is not what this template starts"
        request = Request(module, arguments, dict(env), str(cwd), ignore_warnings=self._ignore_warnings)
        with Path(os.devnull).open("rb") as nothing:
            streams = [stream.fileno() for stream in (stdin or nothing, stdout, stderr)]
            return WarmProcess(command, ask(self._socket, request, streams))

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


@contextmanager
def stages(names: Sequence[str]) -> Iterator[Path]:
    """Start the stages, each of which builds on the one before; the directory of their sockets, by their names."""
    directory = Path(tempfile.mkdtemp(prefix="warm-", dir="/tmp"))  # short: a Unix socket's path holds 108 bytes
    unwanted = ("FARM_", "REDIS_URL", "E2B_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    with ExitStack() as ours:
        ours.callback(shutil.rmtree, directory)
        wanted = []
        reading, writing = os.pipe()
        with ExitStack() as theirs:
            theirs.callback(os.close, reading)
            for name in names:
                listening = theirs.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listening.bind(str(directory / name))
                listening.listen(128)
                wanted.append((listening.fileno(), _STAGES[name]))
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.support.template", str(reading)),
                    *(f"{descriptor}:{','.join(modules)}" for descriptor, modules in wanted),
                ],
                env={**kept, **_ENVIRONMENT, "PYTHONPATH": str(_ROOT), MARK: "-" * MARK_LENGTH},
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=(reading, *(descriptor for descriptor, _ in wanted)),
            )
        ours.callback(process.wait)
        ours.callback(os.close, writing)
        yield directory


def farm() -> Template:
    """For every command that needs neither torch nor the dashboard's page."""
    return Template(_socket("farm"))


def dashboard() -> Template:
    """For an orchestrator that serves the dashboard's page."""
    return Template(_socket("dashboard"))


def trainer() -> Template:
    """For commands that train, whose libraries' warnings are let by."""
    return Template(_socket("trainer"), ignore_warnings=True)


@functools.cache
def _socket(name: str) -> Path:
    """Of the suite's stage; where there is none, of one that is started now and ends with this process."""
    if name in SUITE_STAGES and (shared := os.environ.get(SHARED)) is not None:
        return Path(shared) / name
    lasting = ExitStack()
    atexit.register(lasting.close)
    return lasting.enter_context(stages((*_BEFORE.get(name, ()), name))) / name


def _readable(descriptor: int, seconds: float | None) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])
