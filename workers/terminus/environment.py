"""One session of the Terminus environment: one sandbox, one tool, on OpenEnv's MCPEnvironment.

Speaks the wire of OpenEnv's own Terminus (tool `terminal(command, final_answer)`, reset arguments `setup` and
`verify`, the same reset metadata and state), with these decisions of ours:

- Verify commands are held-out: whoever holds the session is often the policy itself. So `verify_commands` in metadata
  and state is always an empty list (the key and its kind stay), the reset message names their number, and results
  say passed or failed only.
- The reward is passed/total of the verify commands. Nothing that the sandbox wrote (`reward.txt`) counts. The first one
  stands: who could submit again after it would try until it is good.
- A creation is one attempt. Failures of a provider are typed data in the metadata (`failure`), and an error for plain
  clients; after one in a step the session stays failed.
- `close` never raises: a failed deletion is reported (teardown.py).
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment  # type: ignore[import-untyped]
from openenv.core.env_server.types import Action, Observation  # type: ignore[import-untyped]

from orchestrator.errors import OutcomeUnknown, ProviderError, SandboxGone
from orchestrator.provider import CommandResult, Provider, Sandbox
from orchestrator.settings import ANSWER_SECONDS, Budgets
from workers.terminus import observation
from workers.terminus.session import (
    SessionDefaults,
    ShellResult,
    TerminusState,
    create_request,
    session_budgets,
    session_commands,
)
from workers.terminus.teardown import TeardownFailures
from workers.terminus.wire import to_wire

_MAKE_LOGS = "mkdir -p /home/user/logs/verifier"
"""As OpenEnv's own server does it: verify commands write their logs there. Nothing in it is read."""

_COMMANDS_KEPT = 64
"""Commands that the state remembers; an endless session must not grow without bound."""


class TerminusEnvironment(MCPEnvironment):  # type: ignore[misc]
    """One session; its methods may be called from any thread, its commands run one after another."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self,
        provider: Provider,
        budgets: Budgets,
        teardowns: TeardownFailures,
        *,
        defaults: SessionDefaults | None = None,
        on_closed: Callable[[TerminusEnvironment], None] | None = None,
    ) -> None:
        super().__init__(FastMCP("terminus_env"))
        self._provider = provider
        self._budgets = budgets
        self._own_budgets = budgets
        self._teardowns = teardowns
        self._defaults = defaults or SessionDefaults()
        self._on_closed = on_closed
        self._sandbox: Sandbox | None = None
        self._verify: list[str] = []
        self._failure: ProviderError | None = None
        self._last: dict[str, Any] = {}
        self._state = TerminusState(episode_id=str(uuid4()), step_count=0)
        # Guards which sandbox is ours. Held while one is created, so that a close waits for it and deletes it.
        self._owning = threading.Lock()
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="terminus")
        self.tool()(self._tool())

    def _tool(self) -> Callable[..., Any]:
        this = weakref.ref(self)  # FastMCP's caches keep the functions of the last 5,000 sessions, and what those hold

        async def terminal(command: str = "", final_answer: str = "") -> str:
            """Run a shell command or submit a final answer inside the sandbox.

            Args:
                command: Shell command to execute in the episode's sandbox.
                final_answer: Answer to submit; any verify commands of the reset then run.

            Returns:
                The command's output, or a summary of the verification.
            """
            environment = this()
            if environment is None:
                raise RuntimeError("the session is over")
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(environment._thread, environment._terminal, command, final_answer)

        return terminal

    # reset

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Create a fresh sandbox, in one attempt, and run the setup commands in it."""
        self._release()
        self._state = TerminusState(episode_id=episode_id or str(uuid4()), step_count=0)
        self._failure, self._last = None, {}
        try:
            self._budgets = session_budgets(kwargs.get("budgets"), self._own_budgets)
            setup, verify = session_commands(kwargs, "setup"), session_commands(kwargs, "verify")
            self._create(kwargs.get("allocation"))
            return self._set_up(setup, verify)
        except ProviderError as error:
            self._failure = error
            self._state.last_error = str(error)
            return _refused(
                error=f"failed to create sandbox: {type(error).__name__}: {error}",
                sandbox_id=self._state.sandbox_id,
                failure=to_wire(error),
            )

    def _create(self, allocation: Any) -> None:
        request = create_request(allocation, self._defaults)
        with self._owning:
            if self._closed:
                raise SandboxGone("the session was closed")
            self._sandbox = self._provider.create(request)
            self._state.sandbox_id = self._sandbox.sandbox_id

    def _set_up(self, setup: list[str], verify: list[str]) -> Observation:
        self._verify = verify
        if verify:
            self._execute(_MAKE_LOGS)
        results = [self._shell(command) for command in setup]
        self._state.setup_results = results
        shown = [result.model_dump() for result in results]
        if not all(result.success for result in results):
            return _refused(sandbox_id=self._state.sandbox_id, message="Setup command failed.", setup_results=shown)
        message = "Terminus environment ready. Use terminal(command=...) to work."
        if setup:
            message += f" Setup commands run: {len(setup)}."
        if verify:
            message += f" Verify commands registered: {len(verify)}."
        return Observation(
            done=False,
            reward=None,
            metadata={
                "status": "ready",
                "sandbox_id": self._state.sandbox_id,
                "message": message,
                "setup_results": shown,
                "verify_commands": [],
            },
        )

    # step

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Run one action; a terminal step's facts go into the metadata."""
        self._last, before = {}, self._state.step_count
        return self._stepped(await super().step_async(action, timeout_s=timeout_s, **kwargs), before)

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """The same from synchronous code."""
        self._last, before = {}, self._state.step_count
        return self._stepped(super().step(action, timeout_s=timeout_s, **kwargs), before)

    def _stepped(self, seen: Observation, before: int) -> Observation:
        if self._state.step_count == before:  # the tool counts itself: plain MCP calls come past these steps
            self._state.step_count += 1
        seen.metadata = {**seen.metadata, **self._last}
        if self._state.last_reward is not None:
            seen.done, seen.reward = True, self._state.last_reward
        return seen

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(
            done=False,
            reward=None,
            metadata={
                "error": f"Unknown action type: {type(action).__name__}. "
                "Use ListToolsAction or CallToolAction for MCP interactions."
            },
        )

    def _terminal(self, command: str, final_answer: str) -> str:
        self._state.step_count += 1
        if self._failure is None and self._sandbox is None:
            self._last = {"failure": to_wire(SandboxGone("the session has no sandbox"))}
            return "Error: environment not reset. Call reset() first."
        try:
            if self._failure is not None:
                raise self._failure
            if final_answer:
                return self._submit(final_answer)
            if not command.strip():
                return "Error: command or final_answer is required."
            return self._run_command(command)
        except ProviderError as error:
            self._failure = error
            self._state.last_error = str(error)
            self._last = {"failure": to_wire(error)}
            raise

    def _run_command(self, command: str) -> str:
        if len(command.encode(errors="surrogatepass")) > self._budgets.command_bytes:
            return f"Error: command is longer than {self._budgets.command_bytes} bytes."
        seen = self._observe(self._execute(command))
        self._last = {
            "exit_code": seen.exit_code,
            "timed_out": seen.timed_out,
            "truncated": seen.truncated,
            "binary": seen.binary,
        }
        result = ShellResult(command=command, output=seen.text, success=seen.exit_code == 0)
        self._state.commands = [*self._state.commands[1 - _COMMANDS_KEPT :], result]
        return seen.text

    def _submit(self, answer: str) -> str:
        if (reward := self._state.last_reward) is not None:
            return f"Error: an answer was submitted already; reward={reward}. Call reset() for another episode."
        self._state.submitted_answer = answer
        if not self._verify:
            return f"Answer submitted: {answer}"
        self._execute(_MAKE_LOGS)
        passed = [self._execute(command).exit_code == 0 for command in self._verify]
        self._state.verify_results = [ShellResult(command="", success=success) for success in passed]
        reward = sum(passed) / len(passed)
        self._state.last_reward = reward
        return f"Answer submitted: {answer}\nVerification: {sum(passed)}/{len(passed)} passed; reward={reward}"

    def _shell(self, command: str) -> ShellResult:
        seen = self._observe(self._execute(command))
        error = None if seen.exit_code == 0 else f"exit code {seen.exit_code}"
        return ShellResult(command=command, output=seen.text, error=error, success=error is None)

    def _execute(self, command: str) -> CommandResult:
        sandbox = self._sandbox
        if sandbox is None:
            raise SandboxGone("the session was closed")
        limits = self._budgets
        patience = min(limits.command_seconds + ANSWER_SECONDS, max(1.0, limits.message_seconds - 1))
        if patience <= limits.command_seconds:
            raise OutcomeUnknown("message_seconds leaves a command no time to answer; raise it")
        return sandbox.run(
            command,
            timeout_seconds=limits.command_seconds,
            output_limit_bytes=limits.observation_bytes,
            response_seconds=patience,
        )

    def _observe(self, result: CommandResult) -> observation.Observation:
        return observation.observe(
            result,
            limit_bytes=self._budgets.observation_bytes,
            command_seconds=self._budgets.command_seconds,
        )

    # state and end

    @property
    def state(self) -> TerminusState:
        """What the session holder may read."""
        return self._state

    def close(self) -> None:
        """Delete the sandbox; may be called again, and never raises."""
        self._release(closing=True)
        self._thread.shutdown(wait=False)
        if self._on_closed is not None:
            self._on_closed(self)
        super().close()

    def _release(self, *, closing: bool = False) -> None:
        with self._owning:
            self._closed = self._closed or closing
            sandbox, self._sandbox = self._sandbox, None
            if sandbox is None:
                return
            try:
                self._provider.delete(sandbox.sandbox_id)
            except ProviderError as error:
                self._teardowns.report(sandbox.sandbox_id, error)


def _refused(**metadata: Any) -> Observation:
    present = {key: value for key, value in metadata.items() if value is not None}
    return Observation(done=True, reward=None, metadata={"status": "error", **present})
