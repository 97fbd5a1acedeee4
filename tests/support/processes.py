"""Commands and workers as real processes: whatever descends from one carries its mark, is found by it and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rq import Worker

from orchestrator.connection import client
from orchestrator.settings import REDIS_TLS_FILES, Settings
from tests.support import warm
from tests.support.template import MARK
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


class Marked:
    """A process of ours in a session of its own; whatever descends from it carries its mark in the environment."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: Path,
        output: Path,
        template: warm.Template | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.output = output
        marked = {**environment, MARK: self.mark}
        self.process: subprocess.Popen[bytes] | warm.WarmProcess
        with output.open("ab") as stdout, output.with_suffix(".err").open("ab") as stderr:
            if template is not None:
                self.process = template.start(command, env=marked, cwd=cwd, stdout=stdout, stderr=stderr)
            else:
                self.process = subprocess.Popen(
                    command,
                    env=marked,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )

    @property
    def pid(self) -> int:
        """The process itself."""
        return self.process.pid

    @property
    def stderr(self) -> str:
        """What it wrote to its standard error so far."""
        return self.output.with_suffix(".err").read_text(errors="replace")

    @property
    def stdout(self) -> str:
        """What it wrote to its standard output so far."""
        return self.output.read_text(errors="replace")

    def alive(self) -> list[int]:
        """Every process that carries the mark, wherever it has gone."""
        found = []
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit() and (pid := int(directory.name)) not in (os.getpid(), 0):
                try:
                    marked = f"{MARK}={self.mark}".encode() in (directory / "environ").read_bytes()
                    if marked and _stat(pid)[0] != "Z":
                        found.append(pid)
                except OSError:
                    continue
        return found

    def interrupt_group(self) -> None:
        """What a terminal's Ctrl-C does: SIGINT to the foreground process group."""
        os.killpg(self.pid, signal.SIGINT)

    def wait(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.process.args!r} still runs after {seconds:g} s:\n{self.stderr}") from None

    def end(self) -> None:
        """Make sure that nothing of it is left, by pid."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class WorkerProcess(Marked):
    """`rollout-farm worker`, and what it consists of."""

    def __init__(self, settings: Settings, worker_id: str, *, template: warm.Template | None) -> None:
        self.worker_id = worker_id
        self.settings = settings
        directory = settings.state_dir / f"worker-{uuid.uuid4().hex[:8]}"
        directory.mkdir(parents=True)
        super().__init__(
            [*warm.FARM_COMMAND, "worker", "--id", worker_id],
            environment=worker_environment(settings),
            cwd=directory,
            output=directory / "output",
            template=template,
        )
        self._bytes = client(settings, text=False)

    def end(self) -> None:
        """Make sure that nothing of it is left."""
        super().end()
        self._bytes.close()

    def wait_ready(self) -> None:
        """Until both slots listen."""
        wait_until(
            lambda: len(self.slots()) == 2 or self.process.poll() is not None,
            description=f"slots of {self.worker_id}",
            seconds=40,
        )
        assert self.process.poll() is None, self.stderr

    def slots(self) -> dict[str, int]:
        """Name and pid of the slots as RQ lists them."""
        rows = Worker.all(connection=self._bytes)
        living = {row.name: row.pid for row in rows if row.name.startswith(f"{self.worker_id}-") and row.pid}
        return {name: pid for name, pid in living.items() if exists(pid)}

    def terminus(self) -> int | None:
        """The pid of its Terminus server: the child that is no slot."""
        others = [pid for pid in children(self.pid) if pid not in self.slots().values()]
        return others[0] if len(others) == 1 else None

    def horses_of(self, slot: int) -> list[int]:
        """Pids of the work horses of one slot."""
        return children(slot)


def worker_environment(settings: Settings) -> dict[str, str]:
    """The environment by which a process of ours gets these settings."""
    unwanted = ("FARM_", "REDIS_URL", "E2B_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    environment["PYTHONPATH"] = str(ROOT)
    environment["REDIS_URL"] = settings.redis_url or ""
    environment["E2B_API_KEY"] = settings.e2b_api_key.get_secret_value() if settings.e2b_api_key else ""
    environment["FARM_E2B_API_URL"] = settings.e2b_api_url or ""
    environment["FARM_STATE_DIR"] = str(settings.state_dir)
    for name in (
        "lease_renew_seconds",
        "lease_lost_seconds",
        "trainer_beat_seconds",
        "trainer_lost_seconds",
        "drain_seconds",
        "terminus_hung_seconds",
        "log_level",
    ):
        environment[f"FARM_{name.upper()}"] = str(getattr(settings, name))
    for name in REDIS_TLS_FILES:
        if (path := getattr(settings, name)) is not None:
            environment[f"FARM_{name.upper()}"] = str(path)
    environment["FARM_CONCURRENCY_LIMIT"] = str(settings.concurrency_limit)
    for name, value in settings.budgets.model_dump().items():
        environment[f"FARM_BUDGETS__{name.upper()}"] = str(value)
    return environment


def _stat(pid: int) -> tuple[str, int, int]:
    """State, parent and start time (in ticks since boot) of a process; raises OSError when it is gone."""
    rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return rest[0], int(rest[1]), int(rest[19])


def exists(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Living children of a process."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                state, parent, _ = _stat(int(directory.name))
            except OSError:
                continue
            if parent == pid and state != "Z":
                found.append(int(directory.name))
    return sorted(found)


def descendants(pid: int) -> set[tuple[int, int]]:
    """A process and all that descends from it, as (pid, start time): a number that is used again is another's."""
    parents: dict[int, list[int]] = {}
    started: dict[int, int] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):
                _, parent, since = _stat(int(directory.name))
                parents.setdefault(parent, []).append(int(directory.name))
                started[int(directory.name)] = since
    found, todo = set(), [pid]
    while todo:
        one = todo.pop()
        if one in started:
            found.add((one, started[one]))
        todo += parents.get(one, [])
    return found


def is_alive(process: tuple[int, int]) -> bool:
    """Whether the very process that `descendants` saw runs (a zombie does not)."""
    try:
        state, _, since = _stat(process[0])
    except OSError:
        return False
    return state != "Z" and since == process[1]


def slots_of(worker: int) -> list[int]:
    """Pids of a supervisor's slots: its children but the one that listens, its Terminus server."""
    return [pid for pid in children(worker) if not _listens(pid)]


def _listens(pid: int) -> bool:
    """Whether a process holds a listening TCP socket: of a worker's children only its Terminus server does."""
    try:
        held = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    listening = {f"socket:[{row.split()[9]}]" for row in rows if row.split()[3] == "0A"}
    return not held.isdisjoint(listening)
