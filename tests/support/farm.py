"""A farm to test with, of real parts only: one Redis server, one sandbox service and one Terminus server a session.

A test module that needs it says `pytest_plugins = ["tests.support.farm"]` and takes the fixture `field`: an empty
database, and the means to run an episode in this process (`run`, `remote`) or in real workers (`worker`). What always
holds after a test: what the fixture handed out has ended, no process that it started is left, and no key of the farm
lives without a reason. PYTEST_DONT_REWRITE: those modules import this one before pytest learns that it is a plugin.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from rq import Worker

from deploy.embedded import EmbeddedRedis, LocalSandboxes
from orchestrator.episodes import Episode
from orchestrator.farm import Farm, open_farm
from orchestrator.finished import START, Finished
from orchestrator.keys import Keys
from orchestrator.mailbox import Mailbox
from orchestrator.provider import Provider, SandboxRow
from orchestrator.reconciler import Reconciler
from orchestrator.records import EpisodeSpec, Script, SettledReceipt
from orchestrator.rounds import run_rounds
from orchestrator.settings import Budgets, Settings
from orchestrator.tasks import Task, load_builtin
from orchestrator.vocabulary import Drive, Outcome
from tests.support.redis_server import leaks
from tests.support.waiting import wait_until
from workers import jobs
from workers.sandboxes.provider import E2BProvider
from workers.terminus.client import TerminusSession

KEY = "farm-test-key"
REPORT = "/home/user/report.py"
ROOT = Path(__file__).resolve().parents[2]

BUDGETS = Budgets(
    admission_seconds=30,
    reserved_admission_seconds=20,
    deadline_seconds=60,
    policy_window_seconds=30,
    command_seconds=2,
    message_seconds=8,
    verifier_command_seconds=8,
    cleanup_seconds=20,
)
"""Like the defaults, but a command that hangs costs a test two seconds instead of ten."""

_DATABASES = itertools.cycle(range(12))
_LASTING_DATABASES = iter(range(12, 16))
"""For farms that live longer than a test; nobody else empties them."""

_TERMINUS = """
import sys
from orchestrator.settings import Budgets
from workers.sandboxes.provider import E2BProvider
from workers.terminus.server import serve
key, url, budgets, deletes = sys.argv[1:]
provider = E2BProvider(key, api_url=url)
if deletes == "no":
    provider.delete = lambda sandbox_id: None
serve(provider, Budgets.model_validate_json(budgets), port=0, ready=lambda at: print(at, flush=True))
"""


def write_file(path: str, text: str) -> str:
    """The shell command that writes `text` to `path`."""
    return f"printf %s {shlex.quote(text)} > {shlex.quote(path)}"


def candidate(source: str) -> str:
    """The shell command by which a policy puts its own report.py in place."""
    return write_file(REPORT, source)


def script(*commands: str, submit: bool = True) -> Script:
    """A policy of these commands."""
    return Script(commands=commands, submit=submit)


def weekly_sales(**changes: Any) -> Task:
    """The built-in task, changed."""
    return load_builtin("weekly-sales").model_copy(update=changes)


def repaired() -> str:
    """The source of a right report.py."""
    wrong = load_builtin("weekly-sales").files[REPORT]
    return wrong.replace('= int(row["amount"])', '= totals.get(row["region"], 0) + int(row["amount"])')


@contextmanager
def terminus_server(
    url: str, budgets: Budgets = BUDGETS, *, key: str = KEY, deletes: bool = True
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A Terminus server in a process of its own: its base URL and the process. Without `deletes` it only says so."""
    command = [sys.executable, "-c", _TERMINUS, key, url, budgets.model_dump_json(), "yes" if deletes else "no"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.terminate()
            process.wait(20)


@dataclass(frozen=True)
class Ground:
    """What lasts for the whole session."""

    redis: EmbeddedRedis
    sandboxes: LocalSandboxes
    terminus_url: str
    directory: Path


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Redis, the sandbox service and a Terminus server."""
    directory = tmp_path_factory.mktemp("ground")
    with (
        EmbeddedRedis(directory / "redis", appendfsync="no") as redis,
        LocalSandboxes(directory / "sandboxes", api_key=KEY) as sandboxes,
        terminus_server(sandboxes.url) as (terminus_url, _),
    ):
        yield Ground(redis, sandboxes, terminus_url, directory)


@pytest.fixture
def field(ground: Ground) -> Iterator[Field]:
    """An empty farm for one test."""
    with open_field(ground) as opened:
        yield opened


def open_settings(ground: Ground, *, own_database: bool = False, **changes: Any) -> Settings:
    """Settings that reach the session's servers and an empty database."""
    number = next(_LASTING_DATABASES if own_database else _DATABASES)
    url = re.sub(r"db=\d+", f"db={number}", ground.redis.url)
    with Redis.from_url(url) as redis:
        redis.flushdb()
    given: dict[str, Any] = {
        "redis_url": url,
        "e2b_api_key": KEY,
        "e2b_api_url": ground.sandboxes.url,
        "budgets": BUDGETS,
        "state_dir": ground.directory / "state",
    }
    return Settings(_env_file=None, **{**given, **changes})  # type: ignore[call-arg]


@contextmanager
def open_field(ground: Ground, *, own_database: bool = False, **changes: Any) -> Iterator[Field]:
    """An empty farm with settings changed; ends what it handed out."""
    settings = open_settings(ground, own_database=own_database, **changes)
    with ExitStack() as exits:
        yield Field(ground, settings, open_farm(settings), E2BProvider(KEY, api_url=ground.sandboxes.url), exits, [])


@dataclass
class Running:
    """A remote episode that a thread of this process runs, and the trainer's handle on it."""

    episode: Episode
    thread: threading.Thread
    failures: list[BaseException]

    def end(self, seconds: float = 20) -> None:
        """Wait until the run has ended; raise what it raised."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the run has not ended"
        if self.failures:
            raise self.failures[0]


@dataclass
class Field:
    """One test's farm."""

    ground: Ground
    settings: Settings
    farm: Farm
    provider: E2BProvider
    exits: ExitStack
    workers: list[WorkerProcess]

    # running episodes in this process

    def spec(
        self,
        policy: Script | None = None,
        *,
        task: Task | None = None,
        budgets: Budgets | None = None,
        template: str = "base",
        **changes: Any,
    ) -> EpisodeSpec:
        """An episode of the weekly-sales task: driven by `policy`, or remotely without one."""
        given: dict[str, Any] = {
            "episode_id": f"e-{uuid.uuid4().hex[:12]}",
            "run_id": "run-test",
            "task": task or weekly_sales(),
            "template": template,
            "drive": Drive.REMOTE if policy is None else Drive.AUTONOMOUS,
            "policy": policy,
            "trainer_id": "trainer-test" if policy is None else None,
            "budgets": budgets or self.settings.budgets,
        }
        return EpisodeSpec(**{**given, **changes})

    def run(
        self,
        spec: EpisodeSpec,
        *,
        provider: Provider | None = None,
        terminus_url: str | None = None,
        attempt: int = 1,
    ) -> str:
        """Run an episode to its end in this thread, as a work horse does; what the job returned."""
        self.farm.ledger.open(spec)
        context = jobs.SlotContext(
            self.settings,
            "worker-test",
            "worker-test-1",
            self.farm,
            provider or self.provider,
            lambda budgets: TerminusSession(terminus_url or self.ground.terminus_url, budgets),
        )
        return jobs._Run(context, spec, attempt).run()

    def remote(self, spec: EpisodeSpec, **options: Any) -> Running:
        """Run a remote episode in a thread; its trainer is alive for `trainer_lost_seconds`."""
        assert spec.trainer_id is not None
        self.farm.presence.beat_trainer(spec.trainer_id)
        self.farm.ledger.open(spec)
        failures: list[BaseException] = []

        def main() -> None:
            try:
                self.run(spec, **options)
            except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                failures.append(error)

        thread = threading.Thread(target=main, name=f"run {spec.episode_id}", daemon=True)
        thread.start()
        episode = Episode(
            spec,
            Mailbox(self.farm.redis, spec.episode_id),
            self.farm.ledger,
            Finished(self.farm.redis, spec.run_id),
        )
        return Running(episode, thread, failures)

    # real processes

    def start_worker(self, worker_id: str = "w1") -> WorkerProcess:
        """Start a worker; it is ended with the field."""
        started = WorkerProcess(self.settings, worker_id)
        self.exits.callback(started.end)
        self.workers.append(started)
        return started

    def worker(self, worker_id: str = "w1") -> WorkerProcess:
        """Start a worker and wait until its slots take jobs."""
        started = self.start_worker(worker_id)
        started.wait_ready()
        return started

    def reconcile(self, every_seconds: float = 2.0) -> None:
        """Let a reconciler make its rounds until the end of the test."""
        stop = threading.Event()
        farm = open_farm(self.settings)
        reconciler = Reconciler(
            "reconciler-test",
            ledger=farm.ledger,
            queue=farm.queue,
            provider=self.provider,
            lease_seconds=self.settings.lease_lost_seconds,
        )

        def main() -> None:
            run_rounds(
                farm.redis, reconciler, "leader-test", every_seconds=every_seconds, stop=stop, on_report=lambda _: None
            )

        thread = threading.Thread(target=main, name="reconciler", daemon=True)
        thread.start()
        self.exits.callback(thread.join, 20)
        self.exits.callback(stop.set)

    # what can be seen

    def events(self, episode_id: str) -> list[dict[str, Any]]:
        """What the provider itself logged of an episode's sandboxes, oldest first."""
        answer = httpx.get(f"{self.settings.e2b_api_url}/admin/events", headers={"X-API-KEY": KEY}, timeout=10)
        rows: list[dict[str, Any]] = answer.raise_for_status().json()
        return [row for row in rows if row["metadata"].get("episode") == episode_id]

    def running(self, episode_id: str) -> list[SandboxRow]:
        """Sandboxes of an episode in the provider's own list."""
        return self.provider.list({"episode": episode_id})

    def receipt(self, episode_id: str) -> SettledReceipt:
        """The episode's receipt; fails when it has none."""
        settled = self.farm.ledger.receipt(episode_id)
        assert settled is not None, "no receipt"
        return settled

    def wait_receipt(self, episode_id: str, seconds: float = 20) -> SettledReceipt:
        """Wait for the receipt."""
        wait_until(
            lambda: self.farm.ledger.receipt(episode_id), description=f"receipt of {episode_id}", seconds=seconds
        )
        return self.receipt(episode_id)

    def policy_sandbox(self, episode_id: str) -> str:
        """The id of the episode's running policy sandbox, once there is one."""
        wait_until(lambda: self.running(episode_id), description="a policy sandbox")
        return self.running(episode_id)[0].sandbox_id

    def check_ended(
        self, episode_id: str, outcome: Outcome, *, roles: Sequence[str] = ("policy",), unresolved: bool = False
    ) -> SettledReceipt:
        """Check all that must be so after any end: one receipt, its reward, nothing running, nothing held."""
        settled = self.receipt(episode_id)
        receipt, redis = settled.receipt, self.farm.redis
        assert receipt.outcome is outcome, f"{receipt.outcome}: {receipt.detail}"
        assert receipt.reward == outcome.score
        assert (receipt.reward is None) is (not outcome.scored)
        finished = [episode for _, episode in Finished(redis, receipt.run_id).after(START, 1)]
        assert finished.count(episode_id) == 1
        assert redis.zscore(Keys.RECEIPTS, episode_id) is not None
        assert self.farm.ledger.row(episode_id).state == "final"  # type: ignore[union-attr]
        for place in (Keys.OPEN, Keys.LEASES, Keys.WAITERS, Keys.WAITERS_SEEN):
            assert redis.zscore(place, episode_id) is None, place
        created = [row for row in self.events(episode_id) if row["event"] == "created"]
        assert [row["metadata"]["role"] for row in created] == list(roles)
        if not unresolved:
            assert redis.zscore(Keys.PERMITS, episode_id) is None
            assert self.running(episode_id) == []
            self.check_absent(episode_id, settled)
            assert leaks(redis) == []
        return settled

    def check_absent(self, episode_id: str, settled: SettledReceipt) -> None:
        """Every sandbox ended by the provider's own log, each policy before any verifier began."""
        events = self.events(episode_id)
        ends = {row["sandbox_id"]: n for n, row in enumerate(events) if row["event"] != "created"}
        begins = {row["sandbox_id"]: n for n, row in enumerate(events) if row["event"] == "created"}
        assert ends.keys() == begins.keys()
        role = {row["sandbox_id"]: row["metadata"]["role"] for row in events}
        for policy, verifier in itertools.product(begins, begins):
            if (role[policy], role[verifier]) == ("policy", "verifier"):
                assert ends[policy] < begins[verifier], "the policy sandbox was there when the verifier was created"
        named = {row.sandbox_id for row in settled.allocations if row.sandbox_id is not None}
        assert named == begins.keys()
        assert all(row.absent_at is not None for row in settled.allocations if row.sandbox_id is not None)


_MARK = "FARM_TEST_MARK"


class Marked:
    """A process of ours in a session of its own; whatever descends from it carries its mark in the environment."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], cwd: Path, output: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.output = output
        with output.open("ab") as stdout, output.with_suffix(".err").open("ab") as stderr:
            self.process = subprocess.Popen(
                command,
                env={**environment, _MARK: self.mark},
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
                    marked = f"{_MARK}={self.mark}".encode() in (directory / "environ").read_bytes()
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

    def __init__(self, settings: Settings, worker_id: str) -> None:
        self.worker_id = worker_id
        self.settings = settings
        assert settings.redis_url is not None
        directory = settings.state_dir / f"worker-{uuid.uuid4().hex[:8]}"
        directory.mkdir(parents=True)
        command = [sys.executable, "-m", "deploy.cli", "worker", "--id", worker_id]
        super().__init__(command, environment=worker_environment(settings), cwd=directory, output=directory / "output")
        self._bytes = Redis.from_url(settings.redis_url)

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
    environment["E2B_API_KEY"] = KEY
    environment["FARM_E2B_API_URL"] = settings.e2b_api_url or ""
    environment["FARM_STATE_DIR"] = str(settings.state_dir)
    for name in ("lease_renew_seconds", "lease_lost_seconds", "trainer_lost_seconds", "drain_seconds", "log_level"):
        environment[f"FARM_{name.upper()}"] = str(getattr(settings, name))
    environment["FARM_CONCURRENCY_LIMIT"] = str(settings.concurrency_limit)
    for name, value in settings.budgets.model_dump().items():
        environment[f"FARM_BUDGETS__{name.upper()}"] = str(value)
    return environment


def _stat(pid: int) -> tuple[str, int]:
    """State and parent of a process; raises OSError when it is gone."""
    rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return rest[0], int(rest[1])


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
                state, parent = _stat(int(directory.name))
            except OSError:
                continue
            if parent == pid and state != "Z":
                found.append(int(directory.name))
    return sorted(found)
