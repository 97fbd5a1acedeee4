"""The plant: every process of a farm, where each can be killed by SIGKILL and is then started again.

What always holds: Redis keeps its data and its address over a kill (append-only file), the sandbox service keeps its
address and loses its sandboxes; workers and their children are restarted by the farm itself, the rest by `mend`. Blows
fall on pids that belong to this plant only. A frozen horse sleeps for longer than its lease and then goes on.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx

from deploy.embedded import EmbeddedRedis, LocalSandboxes
from deploy.embedded.children import leashed
from orchestrator.farm import open_farm
from orchestrator.settings import Settings
from tests.chaos.budgets import BUDGETS
from tests.support.processes import Marked, children, descendants, is_alive, slots_of, worker_environment
from tests.support.waiting import wait_until


class Target(StrEnum):
    """What a blow falls on."""

    HORSE = "horse"
    SLOT = "slot"
    WORKER = "worker"
    TERMINUS = "terminus"
    ORCHESTRATOR = "orchestrator"
    SANDBOXES = "sandboxes"
    REDIS = "redis"
    FREEZE = "freeze"
    """SIGSTOP to a horse: it comes back when its episode has been given up and finished by another."""


_LEASE_SECONDS = 5.0
_FROZEN_SECONDS = 1.5 * _LEASE_SECONDS
_AWAKE_SECONDS = 5.0
"""For a horse that comes back to find that its lease is lost, and to clean up."""
_LOOK_SECONDS = 0.5
"""Between two looks at what descends from the servers."""
_GONE_SECONDS = 10.0
"""For the last process of a killed server to end."""


class Plant:
    """A farm of `workers` workers in `directory`; use `plant(...)`."""

    def __init__(self, directory: Path, workers: int, faults: Mapping[str, Any]) -> None:
        self._directory = directory
        self._faults = dict(faults)
        self._seen: set[tuple[int, int]] = set()
        """Every process of Redis and of the sandbox service, jails included, that was ever seen."""
        self._looked = 0.0
        self._frozen: dict[tuple[int, int], float] = {}
        """Horse -> when it goes on (monotonic)."""
        self._count = workers
        key = f"chaos-{secrets.token_hex(8)}"
        self.redis = EmbeddedRedis(directory / "redis")
        self.redis.start()
        self._sandboxes = LocalSandboxes(directory / "sandboxes", api_key=key)
        self._sandboxes.start()
        port = urlsplit(self._sandboxes.url).port or 0
        self._more_sandboxes: Callable[[], LocalSandboxes] = lambda: LocalSandboxes(
            directory / "sandboxes", api_key=key, port=port
        )
        self.settings = Settings(
            _env_file=None,  # type: ignore[call-arg]
            redis_url=self.redis.url,
            e2b_api_key=key,  # type: ignore[arg-type]
            e2b_api_url=self._sandboxes.url,
            state_dir=directory / "state",
            budgets=BUDGETS,
            lease_renew_seconds=1,
            lease_lost_seconds=_LEASE_SECONDS,
            trainer_lost_seconds=30,
            drain_seconds=5,
            concurrency_limit=2 * workers - 1,  # one less than there are slots, so that it binds
        )
        self._break()
        self._orchestrator = self._command("orchestrator")
        self._crew = self._command("worker", "--count", str(workers), "--id", "w")
        self.starts = {"orchestrator": 1, "sandboxes": 1, "redis": 1}

    @property
    def sandbox_root(self) -> Path:
        """Where the sandbox service keeps what belongs to running sandboxes."""
        return self._directory / "sandboxes"

    def wait_ready(self) -> None:
        """Until all workers have reported."""
        farm = open_farm(self.settings)
        wait_until(lambda: len(farm.presence.workers()) >= self._count, description="the workers are up", seconds=60)

    def strike(self, target: Target, random: Random) -> int | None:
        """Kill one process of this kind, whichever `random` says; its pid, or None when nothing was hit just now."""
        pids = list(self._pids(target))
        if not pids:
            return None
        pid = random.choice(pids)
        self._look()
        try:
            if target is Target.FREEZE:
                horse = next((one for one in descendants(pid) if one[0] == pid), None)
                if horse is None or horse in self._frozen:
                    return None
                os.kill(pid, signal.SIGSTOP)
                self._frozen[horse] = time.monotonic() + _FROZEN_SECONDS
            else:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None  # it went by itself
        return pid

    @property
    def frozen(self) -> bool:
        """Whether a horse sleeps, or has just come back; an idle one lives on and waits for its next episode."""
        latest = time.monotonic() - _AWAKE_SECONDS
        self._frozen = {horse: until for horse, until in self._frozen.items() if until > latest and is_alive(horse)}
        return bool(self._frozen)

    def mend(self) -> None:
        """Start again what has died and has nobody else to start it; let go on what has slept for long enough."""
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look()
        self._thaw(time.monotonic())
        if self.redis.pid is None:
            self.redis.kill()  # reaps it
            self.redis.start()
            self.starts["redis"] += 1
        if self._sandboxes.pid is None:
            self._sandboxes.stop()  # reaps it, and removes what it left
            self._sandboxes = self._more_sandboxes()
            self._sandboxes.start()
            self._break()
            self.starts["sandboxes"] += 1
        if self._orchestrator.process.poll() is not None:
            self._orchestrator.end()
            self._orchestrator = self._command("orchestrator")
            self.starts["orchestrator"] += 1
        assert self._crew.process.poll() is None, f"the workers ended by themselves:\n{self._crew.stderr[-4000:]}"

    def stop_farm(self) -> list[str]:
        """End workers and orchestrator as an operator would; the pids that were still there afterwards."""
        self._thaw(float("inf"))
        for command in (self._crew, self._orchestrator):
            command.process.terminate()
        for command in (self._crew, self._orchestrator):
            command.wait(60)
        return [str(pid) for command in (self._crew, self._orchestrator) for pid in command.alive()]

    def stop_servers(self) -> dict[str, list[str]]:
        """End the sandbox service and Redis; what they left: directories, looked at before anybody sweeps, and pids."""
        self._look()
        service = self._sandboxes.pid
        if service is not None:
            os.kill(service, signal.SIGTERM)
            wait_until(lambda: self._sandboxes.pid is None, description="the service has ended", seconds=30)
        directories = [path.name for path in self.sandbox_root.rglob("run-*")]
        self.destroy()
        directories += [path.name for path in self.sandbox_root.glob("*/")]
        ends = time.monotonic() + _GONE_SECONDS
        while (left := self._living()) and time.monotonic() < ends:
            time.sleep(0.05)
        return {"directories": directories, "processes of the servers": left}

    def _living(self) -> list[str]:
        return [str(process[0]) for process in self._seen if is_alive(process)]

    def _look(self) -> None:
        self._looked = time.monotonic()
        for pid in (self._sandboxes.pid, self.redis.pid):
            if pid is not None:
                self._seen |= descendants(pid)

    def _thaw(self, now: float) -> None:
        for horse, until in self._frozen.items():
            if until <= now and is_alive(horse):
                with suppress(ProcessLookupError):
                    os.kill(horse[0], signal.SIGCONT)

    def _break(self) -> None:
        """Tell the service what it has to do wrong."""
        if self._faults:
            key = self.settings.e2b_api_key
            assert key is not None
            url, headers = f"{self.settings.e2b_api_url}/admin/faults", {"X-API-KEY": key.get_secret_value()}
            httpx.put(url, json=self._faults, headers=headers, timeout=10).raise_for_status()

    def destroy(self) -> None:
        """End whatever still runs, at once."""
        self._crew.end()
        self._orchestrator.end()
        self._sandboxes.stop()
        self.redis.stop()

    def _pids(self, target: Target) -> Iterator[int]:
        match target:
            case Target.ORCHESTRATOR:
                yield self._orchestrator.pid
            case Target.SANDBOXES | Target.REDIS:
                pid = self._sandboxes.pid if target is Target.SANDBOXES else self.redis.pid
                if pid is not None:
                    yield pid
            case Target.WORKER:
                yield from children(self._crew.pid)
            case _:
                for worker in children(self._crew.pid):
                    yield from self._within(worker, target)

    def _within(self, worker: int, target: Target) -> Iterator[int]:
        slots = slots_of(worker)
        if target is Target.TERMINUS:
            yield from (pid for pid in children(worker) if pid not in slots)
        elif target is Target.SLOT:
            yield from slots
        else:
            for slot in slots:
                yield from children(slot)

    def _command(self, *arguments: str) -> Marked:
        output = self._directory / f"{arguments[0]}.log"
        command = leashed(sys.executable, "-m", "deploy.cli", *arguments)
        return Marked(command, environment=worker_environment(self.settings), cwd=self._directory, output=output)


@contextmanager
def plant(directory: Path, *, workers: int, faults: Mapping[str, Any]) -> Iterator[Plant]:
    """A plant that is up, its service with these faults; whatever happens, nothing of it is left running."""
    built = Plant(directory, workers, faults)
    try:
        built.wait_ready()
        yield built
    finally:
        built.destroy()
