"""A whole farm on one machine: the stack, workers and an orchestrator as children that end with this process.

What always holds: secrets travel in the children's environment, never in their arguments; leaving the context drains
the workers first, then the orchestrator, then the stack, and leaves nothing behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.embedded import Stack
from deploy.embedded.children import end, last_lines, leashed, spawn
from deploy.exit_codes import child_error
from orchestrator.errors import FarmError
from orchestrator.farm import Farm, open_farm
from orchestrator.settings import Settings, as_variables

_READY_SECONDS = 60.0
"""For workers to import everything and report; 2 to 4 s is usual on two idle cores."""

_REPORTED = "error: "
"""How a command of ours begins the line that says why it ends."""


class LocalFarm:
    """`with LocalFarm(settings, workers=2) as farm:` then use `farm.settings`."""

    def __init__(self, settings: Settings, *, workers: int, temporary: bool = False) -> None:
        self._stack = Stack(settings, temporary=temporary)
        self._count = workers
        self._workers: subprocess.Popen[bytes] | None = None
        self._orchestrator: subprocess.Popen[bytes] | None = None
        self.settings = settings

    @property
    def logs(self) -> Path:
        """Where the children's logs are."""
        return self.settings.state_dir / "logs"

    def __enter__(self) -> Self:
        self.settings = self._stack.start()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self._orchestrator = self._child("orchestrator", "orchestrator")
            self._workers = self._child("workers", "worker", "--count", str(self._count))
            self._wait_ready(open_farm(self.settings))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def check(self) -> None:
        """Raise when the stack or a child has ended by itself."""
        self._stack.check()
        for name, child in (("orchestrator", self._orchestrator), ("workers", self._workers)):
            if child is not None and child.poll() is not None:
                raise self._why(name, child.returncode)

    def _why(self, name: str, code: int) -> FarmError:
        """The error that this child reported itself, or all it logged last when it reported none."""
        log = self.logs / f"{name}.log"
        said = [line for line in last_lines(log).splitlines() if line.strip().startswith(_REPORTED)]
        kind = child_error(code)
        if kind is not None and said:
            return kind(said[-1].strip().removeprefix(_REPORTED))
        return FarmError(f"{name} ended with {code}:\n{last_lines(log)}")

    def environment(self) -> dict[str, str]:
        """The environment of a process that works for this farm: ours, and every setting as this farm has it."""
        ours = as_variables(self.settings)
        return {name: value for name, value in os.environ.items() if name.upper() not in ours} | ours

    def _child(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        # -P: a directory of the user's called deploy or workers must not be found in place of ours.
        command = leashed(sys.executable, "-P", "-m", "deploy.cli", *arguments)
        return spawn(command, log=self.logs / f"{name}.log", environment=self.environment())

    def _wait_ready(self, farm: Farm) -> None:
        ends = time.monotonic() + _READY_SECONDS
        while len(farm.presence.workers()) < self._count:
            self.check()
            if time.monotonic() > ends:
                said = last_lines(self.logs / "workers.log")
                raise FarmError(f"workers did not report within {_READY_SECONDS:g} s:\n{said}")
            time.sleep(0.05)

    def _stop(self) -> None:
        """Let the workers finish what runs; on a Ctrl-C meanwhile they close it instead, and then it is passed on."""
        budgets = self.settings.budgets
        closing = budgets.cleanup_seconds + budgets.message_seconds
        try:
            try:
                self._end_workers(self.settings.drain_seconds + closing)
            except KeyboardInterrupt:
                self._end_workers(closing)
                raise
        finally:
            self._workers = None
            if self._orchestrator is not None:
                end(self._orchestrator)
            self._stack.stop()

    def _end_workers(self, seconds: float) -> None:
        child = self._workers
        if child is not None and child.poll() is None:
            end(child, seconds=seconds)
