"""A farm to test with, of real parts only: one Redis server, one sandbox service and one Terminus server a session.

A test module that needs it says `pytest_plugins = ["tests.support.farm"]` and takes the fixture `field`: an empty
database, and the means to run an episode in this process (`run`, `remote`) or in real workers (`worker`). What always
holds after a test: what the fixture handed out has ended, no process that it started is left, and no key of the farm
lives without a reason. PYTEST_DONT_REWRITE: those modules import this one before pytest learns that it is a plugin.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator.episodes import Episode
from orchestrator.farm import open_farm
from orchestrator.finished import Finished
from orchestrator.mailbox import Mailbox
from orchestrator.provider import Provider
from orchestrator.records import EpisodeSpec, Script
from orchestrator.rounds import run_rounds
from orchestrator.settings import Budgets
from orchestrator.tasks import Task
from orchestrator.vocabulary import Drive
from tests.support import warm
from tests.support.checks import Checks
from tests.support.ground import KEY, Ground, ground, lasting_database, open_settings
from tests.support.policies import weekly_sales
from tests.support.processes import WorkerProcess
from tests.support.reconcilers import reconciler_of
from workers import jobs
from workers.sandboxes.provider import E2BProvider
from workers.terminus.client import TerminusSession

__all__ = ["Field", "Running", "field", "ground", "open_field", "running"]
"""`ground` because pytest finds here what `field` asks for."""


@pytest.fixture
def field(ground: Ground) -> Iterator[Field]:
    """An empty farm for one test."""
    with open_field(ground) as opened:
        yield opened


@pytest.fixture
def running(field: Field) -> Iterator[Running]:
    """A remote episode whose sandbox is ready; it ends within the test."""
    started = field.remote(field.spec())
    started.episode.reset()
    yield started
    started.end()


@contextmanager
def open_field(ground: Ground, *, own_database: bool = False, **changes: Any) -> Iterator[Field]:
    """An empty farm with settings changed; ends what it handed out."""
    with ExitStack() as exits:
        database = exits.enter_context(lasting_database()) if own_database else None
        settings = open_settings(ground, database=database, **changes)
        yield Field(settings, open_farm(settings), E2BProvider(KEY, api_url=ground.sandboxes.url), ground, exits, [])


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
class Field(Checks):
    """One test's farm."""

    ground: Ground
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

    def remote(self, spec: EpisodeSpec, *, trainer_alive: bool = True, **options: Any) -> Running:
        """Run a remote episode in a thread; its trainer is alive for `trainer_lost_seconds`, or not yet."""
        assert spec.trainer_id is not None
        if trainer_alive:
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
            self.farm.queue,
            lease_lost_seconds=self.settings.lease_lost_seconds,
        )
        return Running(episode, thread, failures)

    # real processes

    def start_worker(self, worker_id: str = "w1", *, fresh: bool = False) -> WorkerProcess:
        """Start a worker; it is ended with the field."""
        started = WorkerProcess(self.settings, worker_id, template=None if fresh else warm.farm())
        self.exits.callback(started.end)
        self.workers.append(started)
        return started

    def worker(self, worker_id: str = "w1", *, fresh: bool = False) -> WorkerProcess:
        """Start a worker and wait until its slots take jobs."""
        started = self.start_worker(worker_id, fresh=fresh)
        started.wait_ready()
        return started

    def reconcile(self, every_seconds: float = 2.0) -> None:
        """Let a reconciler make its rounds until the end of the test."""
        stop = threading.Event()
        farm = open_farm(self.settings)
        reconciler = reconciler_of(farm, self.provider, lease_seconds=self.settings.lease_lost_seconds)

        def main() -> None:
            run_rounds(
                farm.redis, reconciler, "leader-test", every_seconds=every_seconds, stop=stop, on_report=lambda _: None
            )

        thread = threading.Thread(target=main, name="reconciler", daemon=True)
        thread.start()
        self.exits.callback(thread.join, 20)
        self.exits.callback(stop.set)
