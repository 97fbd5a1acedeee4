"""The farm's pool as an OpenEnv session factory: TRL's AsyncGRPOTrainer and OpenEnv's harness adapters run on it.

What always holds: a factory can be pickled and connects at its first `create`, so in the process that uses it; each
session is one episode of its own, nothing waits for another and no capacity is reserved; what the policy does wrong (an
unknown tool, wrong arguments, a call after the end) is an answer to it; what the farm does wrong leaves the session
without a score for good, is counted, and ends the run above the limit.

Contracts (openenv 0.10, trl 1.16), which the tests hold on to:

- `ResourceSessionFactory.create(task, seed, episode_id)`: TRL gives the row's `prompt` as task, the index of the group
  as seed and a fresh id; OpenEnv's collector gives its task and no seed. Each session has one thread; `close` may come
  from another while a call is on its way, and always comes.
- TRL takes any Exception of create, call_tool or verify for an unscorable rollout: no sample, no reward, the group's
  baseline is made of the others. It only logs it; the count and the limit are ours (session_failures.py).
- TRL needs `harness_adapter=MCPHarnessAdapter()`. Without an adapter it asks for sessions in which an agent owns the
  loop and brings its own tokens (`fetch_training_trace`), which these are not.
- `ToolResult.done` ends the harness's loop. `VerifyResult.env_reward` is the committed reward, never anything else; no
  tool result carries one.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from openenv.core.env_server.mcp_types import Tool  # type: ignore[import-untyped]
from openenv.core.harness import (  # type: ignore[import-untyped]
    Message,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    VerifyResult,
)

from orchestrator.arguments import require_seconds
from orchestrator.episodes import Episode
from orchestrator.errors import (
    CommandRefused,
    EpisodeClosed,
    FarmError,
    InfrastructureLost,
    NeverFits,
    ReceiptOverdue,
)
from orchestrator.pool import Pool, checked_run_id
from orchestrator.settings import Settings
from orchestrator.tasks import Task, TaskError, parse_task
from trainer.absence import PATIENCE_SECONDS, Absence
from trainer.session_failures import FailureLimit, SessionCounts, SessionTally
from trainer.session_tools import TOOLS, shortened, wrong_call

logger = logging.getLogger(__name__)

_TOO_DEEP = "the task is nested too deeply; a task is an object of plain fields"

_CLOSED = "The episode is closed."


class PoolSession(ResourceSession):  # type: ignore[misc]
    """One episode, driven by a harness. Made by a factory; its sandbox is waited for at the first call."""

    def __init__(
        self,
        episode: Episode,
        tally: SessionTally,
        *,
        messages: list[Message],
        session_id: str | None,
        without_workers: Callable[[threading.Event], NeverFits | None],
        forget: Callable[[PoolSession], None],
    ) -> None:
        self.episode = episode
        self._tally = tally
        self._messages = messages
        self._session_id = session_id
        self._without_workers = without_workers
        self._forget = forget
        self._ready = False
        self._failure: FarmError | None = None
        self._verified: VerifyResult | None = None
        self._uncounted = iter((True,))
        self._closing = threading.Event()
        self._closed = threading.Lock()

    def initial_messages(self) -> list[Message]:
        """The prompt; does not wait for the sandbox, so that it comes up while the model begins."""
        return [dict(message) for message in self._messages]

    def list_tools(self) -> list[Tool]:
        """`terminal(command)` and `submit()`."""
        return list(TOOLS)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Carry out a tool call, at most once; the first waits until the sandbox is ready.

        `data` is text; `metadata` has `exit_code`, `timed_out` and `truncated` of a command. `error` marks a call that
        the policy got wrong, and nothing was run. `done` says that the episode has ended. Raises a FarmError when the
        infrastructure failed; the session has no score from then on, whoever swallows it.
        """
        wrong = wrong_call(name, arguments)
        if wrong is not None:
            return ToolResult(data=wrong, error=wrong)
        self._require_healthy()
        try:
            self._await_ready()
            if name == "submit":
                return ToolResult(data=self.episode.submit(), done=True)
            seen = self.episode.terminal(arguments["command"])
        except CommandRefused as error:
            return ToolResult(data=str(error), error=str(error))
        except EpisodeClosed:
            return ToolResult(data=_CLOSED, done=True)
        except FarmError as error:
            self._fail(error)
        metadata = {"exit_code": seen.exit_code, "timed_out": seen.timed_out, "truncated": seen.truncated}
        return ToolResult(data=str(seen), metadata=metadata)

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """The committed reward in [0, 1]; an episode that was not submitted is ended at 0.0.

        `metrics` has `episode_id`, `run_id`, `outcome` and `phases` (seconds by phase) of the receipt, and the caller's
        `session_id`. Raises the session's failure when it has one: never a result without a reward.
        """
        if self._verified is not None:
            return self._verified
        self._require_healthy()
        try:
            self._await_ready()
            reward = self.episode.reward()
            receipt = self.episode.wait()
        except FarmError as error:
            self._fail(error)
        metrics = {
            "episode_id": receipt.episode_id,
            "run_id": receipt.run_id,
            "session_id": self._session_id,
            "outcome": str(receipt.outcome),
            "phases": dict(receipt.phases),
        }
        self._verified = VerifyResult(env_reward=reward, done=True, metrics=metrics)
        if self._counts_now():
            self._tally.scored()
        return self._verified

    def close(self) -> None:
        """End the episode if it has not ended, and wait until it has its receipt. Never raises, and can be called
        again and from any thread: what cannot be closed is logged and counted, and the farm ends it.
        """
        with self._closed:  # a second caller waits until it is true
            if self._closing.is_set():
                return
            self._closing.set()
            self._give_up(by_harness=True)
            try:
                self.episode.close()
            except FarmError as error:
                self._tally.unclosed()
                logger.error("session not closed: %s", error, extra={"episode": self.episode.episode_id})
            else:
                self._forget(self)

    def _await_ready(self) -> None:
        """Wait for the sandbox, but not for ever for a worker: without any, the episode is given up."""
        if self._ready:
            return
        answered = threading.Event()
        found: list[NeverFits] = []

        def watch() -> None:
            if (error := self._without_workers(answered)) is not None:
                found.append(error)
                self.episode.cancel()

        watcher = threading.Thread(target=watch, name=f"ready {self.episode.episode_id}", daemon=True)
        watcher.start()
        try:
            self.episode.reset()
        except (InfrastructureLost, ReceiptOverdue):
            if found:
                raise found[0] from None
            raise
        finally:
            answered.set()
        self._ready = True

    def _require_healthy(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing.is_set():
            raise EpisodeClosed("the session is closed")

    def _give_up(self, *, by_harness: bool) -> None:
        """Count the session as abandoned, if it has not ended otherwise."""
        if self._counts_now():
            self._tally.abandoned(by_harness=by_harness)

    def _counts_now(self) -> bool:
        """True once: a session is counted one time, whichever thread comes first."""
        return next(self._uncounted, False)

    def _fail(self, error: FarmError) -> NoReturn:
        """Remember why there is no score, count it, and raise it, or the end of the run when it was one too many."""
        self._failure = error
        if not self._counts_now():  # ended by ourselves: what close did to a call on its way is no failure
            raise error
        self._tally.failed(error)
        logger.warning("session failed: %s", error, extra={"episode": self.episode.episode_id})
        self._tally.require_few()
        raise error


class PoolSessionFactory(ResourceSessionFactory[PoolSession]):  # type: ignore[misc]
    """Makes sessions, each of them one episode of the farm that `settings` name; needs its Redis and no sandbox key.

    `tasks` are what `create` may name by id. `worker_patience_seconds` is how long a session waits while no worker is
    alive. Use it as a context manager where it is used directly; a copy in another process has its own connection and
    its own counts, under the same run.
    """

    def __init__(
        self,
        settings: Settings,
        tasks: Sequence[Task] = (),
        *,
        run_id: str | None = None,
        system_prompt: str | None = None,
        failures: FailureLimit | None = None,
        worker_patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        require_seconds("worker_patience_seconds", worker_patience_seconds)
        self.run_id = f"run-{secrets.token_hex(5)}" if run_id is None else checked_run_id(run_id)
        self._settings = settings.model_copy(update={"e2b_api_key": None})
        self._tasks = {task.id: task for task in tasks}
        if len(self._tasks) < len(tasks):
            raise TaskError(["two of the tasks have the same id; a row could not name them"])
        self._system_prompt = system_prompt
        self._failures = failures or FailureLimit()
        self._patience = worker_patience_seconds
        self._begin()

    def _begin(self) -> None:
        self._connecting = threading.Lock()
        self._pool: Pool | None = None
        self._owner = 0
        self._sessions: set[PoolSession] = set()
        self._tally = SessionTally(self._failures)

    def __getstate__(self) -> dict[str, Any]:
        lives = ("_connecting", "_pool", "_owner", "_sessions", "_tally")
        return {name: value for name, value in self.__dict__.items() if name not in lives}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __enter__(self) -> PoolSessionFactory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> SessionCounts:
        """How the sessions made in this process stand."""
        return self._tally.counts()

    def rows(self) -> list[dict[str, Any]]:
        """Dataset rows that name the tasks, for TRL: their `prompt` carries an id, the model sees the task's prompt."""
        return [{"prompt": [{"role": "user", "content": task_id}]} for task_id in self._tasks]

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> PoolSession:
        """Enqueue an episode and return at once.

        `task` is a Task, a task's data (a dict or its JSON) or the id of one of `tasks`; or chat messages the last of
        which carries one of these as its content. `seed` names the group. `episode_id` is the caller's own name: it
        is reported by `verify`, and the episode gets one that nobody has used before.

        Raises TaskError for anything else, RedisUnavailable, and TooManyFailures once too many sessions have failed.
        """
        self._tally.require_few()
        self._tally.opened()
        try:
            chosen = self._chosen(task)
            pool = self._connected()
            episode = pool.submit(chosen, group_id=None if seed is None else f"group-{seed}")
        except FarmError as error:
            self._tally.failed(error)
            logger.warning("session not made: %s", error)
            self._tally.require_few()
            raise
        messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages.append({"role": "user", "content": chosen.prompt})
        session = PoolSession(
            episode,
            self._tally,
            messages=messages,
            session_id=episode_id,
            without_workers=lambda answered: _no_worker(pool, self._patience, answered),
            forget=functools.partial(self._forget, pool),
        )
        with self._connecting:
            self._sessions.add(session)
        return session

    def close(self) -> None:
        """Cancel the sessions that are open, which counts them as abandoned, and let go of the connection.

        Can be called again.
        """
        with self._connecting:
            if self._pool is not None and self._owner == os.getpid():
                for session in self._sessions:
                    session._give_up(by_harness=False)
                self._sessions.clear()
                self._pool.close()
                self._pool.redis.close()
            self._pool = None

    def _forget(self, pool: Pool, session: PoolSession) -> None:
        pool.forget(session.episode)
        with self._connecting:
            self._sessions.discard(session)

    def _connected(self) -> Pool:
        with self._connecting:
            if self._pool is None or self._owner != os.getpid():  # a fork must not share its parent's sockets
                self._sessions = set()
                self._pool, self._owner = Pool(self._settings, run_id=self.run_id), os.getpid()
            return self._pool

    def _chosen(self, task: Any) -> Task:
        if isinstance(task, list) and task and isinstance(task[-1], dict):
            task = task[-1].get("content")
        if isinstance(task, Task):
            return task
        if isinstance(task, dict):
            return _parsed(task)
        if isinstance(task, str) and task in self._tasks:
            return self._tasks[task]
        if isinstance(task, str) and task.lstrip().startswith("{"):
            try:
                raw = json.loads(task)
            except ValueError as error:
                raise TaskError([f"the task is no JSON ({error}); write it with json.dumps"]) from None
            except RecursionError:
                raise TaskError([_TOO_DEEP]) from None
            return _parsed(raw)
        known = ", ".join(list(self._tasks)[:5]) or "none were given"
        raise TaskError(
            [
                f"a session needs a task and got {shortened(task)}: give the id of one of the factory's tasks "
                f"({known}), a task as JSON, or a message whose content is one of these"
            ]
        )


def _parsed(raw: object) -> Task:
    try:
        return parse_task(raw)
    except RecursionError:
        raise TaskError([_TOO_DEEP]) from None


def _no_worker(pool: Pool, patience_seconds: float, answered: threading.Event) -> NeverFits | None:
    """Wait until `answered`, or until no worker has been alive for `patience_seconds`: then what to do about it."""
    absence = Absence(pool, patience_seconds)
    while not answered.wait(min(5.0, patience_seconds / 4)):
        if (error := absence.problem()) is not None:
            return error
    return None
