"""Every sandbox from its creation to its confirmed end, and the rules that end one: a call, its time, its own death.

A sandbox that is not in the registry has no process left, and its memory-backed files are gone with it.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from workers.e2b_local.channel import AgentGone, Channel
from workers.e2b_local.events import EventLog, Kind
from workers.e2b_local.jail import Jail, Started

logger = logging.getLogger(__name__)

_START_SECONDS = 20.0
_END_SECONDS = 10.0
State = Literal["running", "paused"]


class SandboxFailed(Exception):
    """A sandbox did not start, or does not end; while the registry still has it, processes of it may be left."""


@dataclass(frozen=True)
class Order:
    """What a creation asks for."""

    template: str
    timeout_seconds: float
    metadata: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    allow_internet_access: bool | None = None
    pause_on_timeout: bool = False


class Sandbox:
    """One jail with its agent."""

    def __init__(self, order: Order) -> None:
        self.id = "i" + secrets.token_hex(10)[:19]
        self.token = secrets.token_hex(16)
        self.order = order
        self.state: State = "running"
        self.started_at = round(time.time(), 6)  # as precise as clients are told it
        self.ends_at = self.started_at + order.timeout_seconds
        self.channel = Channel()
        self.gone = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None  # set once the sandbox has started
        self.ending: Kind | None = None
        self._jail: Started | None = None
        self._init_pidfd: int | None = None

    async def start(self, jail: Jail) -> None:
        """Build the jail and wait until its agent serves; raises SandboxFailed."""
        environment = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self.id, "E2B_TEMPLATE_ID": self.order.template}
        start = {"environment": {**environment, **self.order.environment}, "limits": jail.limits.rlimits()}
        try:
            # In this thread, and it blocks for 2 ms: a jail ends with the thread that started it.
            self._jail = jail.start(self.id, self.channel.agent_end)
            self._watch(self._jail)
            async with asyncio.timeout(_START_SECONDS):
                await self.channel.begin(start)
        except (AgentGone, TimeoutError, OSError) as error:
            ended = await self._ended()
            said = os.read(self._jail.errors, 4096).decode(errors="replace") if self._jail and ended else ""
            raise SandboxFailed(f"sandbox did not start: {said.strip() or error}") from error
        finally:
            if self._jail:
                os.close(self._jail.errors)
                self._learn_init(self._jail.info)

    async def end(self) -> None:
        """Kill every process and wait until none is left; raises SandboxFailed when that does not happen."""
        if not await self._ended():
            raise SandboxFailed(f"sandbox {self.id} does not end")

    def crash(self) -> None:
        """Lose every process, as by a fault of its own; the registry notices."""
        if self._jail and not self.gone.is_set():
            self._kill(self._jail)

    async def _ended(self) -> bool:
        if self._jail is None:
            self.gone.set()
        elif not self.gone.is_set():
            self._kill(self._jail)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), _END_SECONDS)
        self.channel.close()
        return self.gone.is_set()

    def _kill(self, jail: Started) -> None:
        # The kernel ends a process namespace with its first process, and bwrap with the namespace: so bwrap's end
        # confirms that no process is left. Killed first itself, it would confirm nothing.
        with contextlib.suppress(ProcessLookupError):
            if self._init_pidfd is not None:
                signal.pidfd_send_signal(self._init_pidfd, signal.SIGKILL)
            else:
                jail.process.kill()

    def _watch(self, jail: Started) -> None:
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(jail.process.pid)

        def ended() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            jail.process.wait()
            if self._init_pidfd is not None:
                os.close(self._init_pidfd)
                self._init_pidfd = None
            self.gone.set()

        loop.add_reader(pidfd, ended)

    def _learn_init(self, info: int) -> None:
        with os.fdopen(info, "rb") as stream:
            if self.gone.is_set():
                return
            os.set_blocking(info, False)
            with contextlib.suppress(ProcessLookupError, ValueError, TypeError, KeyError):
                self._init_pidfd = os.pidfd_open(json.loads(stream.read(4096))["child-pid"])


class Registry:
    """The sandboxes that exist, those that are starting or ending included."""

    def __init__(self, jail: Jail, log: EventLog) -> None:
        self._jail = jail
        self._log = log
        self._sandboxes: dict[str, Sandbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_started: Callable[[Sandbox], None] = lambda sandbox: None

    def __len__(self) -> int:
        return len(self._sandboxes)

    def all(self) -> list[Sandbox]:
        """Those that have started, oldest first."""
        return [sandbox for sandbox in self._sandboxes.values() if sandbox.timer]

    def find(self, sandbox_id: str) -> Sandbox | None:
        """A sandbox that has started; it is found until its last process is gone."""
        sandbox = self._sandboxes.get(sandbox_id)
        return sandbox if sandbox and sandbox.timer else None

    async def create(self, order: Order) -> Sandbox:
        """Start a sandbox; raises SandboxFailed."""
        sandbox = Sandbox(order)
        self._sandboxes[sandbox.id] = sandbox
        self._log.append("created", sandbox.id, order.metadata)
        try:
            await sandbox.start(self._jail)
        except BaseException as error:
            logger.warning("sandbox did not start", extra={"sandbox_id": sandbox.id, "error": str(error)})
            await self._remove(sandbox, "failed")
            raise
        self.schedule(sandbox, sandbox.ends_at)
        self._spawn(self._notice_death(sandbox))
        self.on_started(sandbox)
        return sandbox

    def schedule(self, sandbox: Sandbox, ends_at: float) -> None:
        """Let the sandbox end at this time instead."""
        if sandbox.timer:
            sandbox.timer.cancel()
        sandbox.ends_at = ends_at
        loop = asyncio.get_running_loop()
        sandbox.timer = loop.call_later(max(0.0, ends_at - time.time()), self._expire, sandbox)

    def pause(self, sandbox: Sandbox) -> None:
        """Refuse requests and stop the clock; the processes go on."""
        sandbox.state = "paused"
        if sandbox.timer:
            sandbox.timer.cancel()

    async def kill(self, sandbox: Sandbox) -> bool:
        """Whether this call ended it: false when it was ending already. Raises SandboxFailed when it will not end."""
        return await self._remove(sandbox, "deleted")

    def kill_later(self, sandbox: Sandbox, seconds: float) -> None:
        """End it so long from now, unless something else ends it before."""
        asyncio.get_running_loop().call_later(seconds, lambda: self._spawn(self._remove(sandbox, "deleted")))

    async def close(self) -> None:
        """End every sandbox."""
        endings = (self._remove(sandbox, "deleted") for sandbox in list(self._sandboxes.values()))
        await asyncio.gather(*endings, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _expire(self, sandbox: Sandbox) -> None:
        if sandbox.order.pause_on_timeout:
            self.pause(sandbox)
        else:
            self._spawn(self._remove(sandbox, "expired"))

    async def _notice_death(self, sandbox: Sandbox) -> None:
        await sandbox.gone.wait()
        await self._remove(sandbox, "lost")

    async def _remove(self, sandbox: Sandbox, event: Kind) -> bool:
        """End a sandbox, however many ask for it; all of them wait, the first one's reason is logged."""
        first = sandbox.ending is None
        sandbox.ending = sandbox.ending or event
        if sandbox.timer:
            sandbox.timer.cancel()
        await sandbox.end()
        if self._sandboxes.pop(sandbox.id, None):
            self._log.append(sandbox.ending, sandbox.id, sandbox.order.metadata)
        return first

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        async def run() -> None:
            try:
                await work
            except SandboxFailed:
                logger.exception("sandbox does not end")

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
