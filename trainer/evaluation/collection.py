"""Running an evaluation's episodes: which are left, and many of them live at once on the farm.

What always holds: the policy is asked in one thread, for no more episodes than it answers at once, those first that
have waited longest, and what it says is carried out before it is asked again: an episode's window runs while others
are answered; every episode that began here has ended or is cancelled when `collect` returns or raises; a result is kept
only of an episode with a receipt, and one that we cancelled ourselves gives none, only what it cost; one process at a
time runs an evaluation: what is found of it is what an earlier one left.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from orchestrator.episodes import Episode
from orchestrator.errors import (
    CommandRefused,
    EpisodeAborted,
    EpisodeClosed,
    FarmError,
    NeverFits,
    RedisUnavailable,
)
from orchestrator.pool import Pool
from orchestrator.records import SettledReceipt
from orchestrator.tasks import Task
from orchestrator.vocabulary import Outcome
from trainer.absence import PATIENCE_SECONDS, Absence
from trainer.evaluation.identity import Identity
from trainer.evaluation.policies import Policy, ToolCall
from trainer.evaluation.results import EpisodeResult, Interrupted
from trainer.evaluation.tools import TOOLS

logger = logging.getLogger(__name__)

C = TypeVar("C")

_LOOK_SECONDS = 1.0
"""How often a wait looks whether the farm is still there."""

_BEAT_LOOK_SECONDS = 0.2
"""How often a heartbeat is looked at, to see whether another one comes."""

_INTERRUPTED = frozenset({Outcome.CANCELLED, Outcome.TRAINER_LOST})
"""How an episode ends whose evaluation was interrupted: not the farm's failure."""

_CUT_SHORT = _INTERRUPTED | {Outcome.WINDOW_EXHAUSTED}
"""How one ends that nobody drove to its end: its window may be over before its trainer is missed."""


@dataclass(frozen=True)
class Planned:
    """One episode to run: the task by its place, the sample, and how often it was run before."""

    task: int
    sample: int
    retry: int


def plan(identity: Identity, results: Sequence[EpisodeResult], *, retry_failed: bool) -> list[Planned]:
    """What is left to run, tasks in turn so that an interrupted evaluation has something of each.

    An episode that has a result is not run again, unless it failed and `retry_failed` asks for it.
    """
    newest: dict[tuple[int, int], EpisodeResult] = {}
    for result in results:
        held = newest.get((result.task, result.sample))
        if held is None or result.retry > held.retry:
            newest[result.task, result.sample] = result
    left = []
    for sample in range(identity.episodes):
        for task in range(len(identity.tasks)):
            ended = newest.get((task, sample))
            if ended is None:
                left.append(Planned(task, sample, 0))
            elif ended.reward is None and retry_failed:
                left.append(Planned(task, sample, ended.retry + 1))
    return left


@dataclass
class _Live(Generic[C]):
    """An episode that runs, its policy's side of it, and what its last turn's calls gave."""

    planned: Planned
    episode: Episode
    conversation: C
    observed: list[tuple[str, str]] = field(default_factory=list)
    waiting_since: float = 0.0
    generation_seconds: float = 0.0
    ready: bool = False
    """A worker has it."""


_Event: TypeAlias = _Live[C] | EpisodeResult | Interrupted | BaseException


class Collector(Generic[C]):
    """Runs episodes of one evaluation; `keep` takes each result in the calling thread, as it comes.

    `keep_interrupted` takes what an interruption cost, this one's or an earlier one's, some of it more than once.
    `worker_patience_seconds` is how long episodes wait while no worker is alive.
    """

    def __init__(
        self,
        pool: Pool,
        identity: Identity,
        tasks: Sequence[Task],
        policy: Policy[C],
        *,
        keep: Callable[[EpisodeResult], None],
        keep_interrupted: Callable[[Interrupted], None] = lambda episode: None,
        check: Callable[[], None] = lambda: None,
        worker_patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._pool = pool
        self._identity = identity
        self._tasks = tasks
        self._policy = policy
        self._keep = keep
        self._keep_interrupted = keep_interrupted
        self._check = check
        self._patience = worker_patience_seconds
        self._events: queue.SimpleQueue[_Event[C]] = queue.SimpleQueue()
        self._live: dict[str, _Live[C]] = {}
        self._stopping = threading.Event()

    def collect(self, planned: Sequence[Planned], *, parallel: int) -> None:
        """Run them all, at most `parallel` at once; raises what failed on the way, after cancelling the rest.

        Raises FarmError, having begun nothing, when another process runs this evaluation, and NeverFits when all that
        was begun waits and no worker has been alive for long.
        """
        self._claim()
        try:
            self._collect(deque(planned), parallel)
        finally:
            with suppress(RedisUnavailable):  # it ends by itself
                self._pool.release_run(self._identity.run_id)

    def _collect(self, todo: deque[Planned], parallel: int) -> None:
        running = 0
        waiting: deque[_Live[C]] = deque()
        threads = ThreadPoolExecutor(parallel, thread_name_prefix="evaluation")
        try:
            while todo or running:
                while todo and running < parallel:
                    self._begin(threads, todo.popleft())
                    running += 1
                for event in self._wait(block=not waiting):
                    if isinstance(event, BaseException):
                        raise event
                    if isinstance(event, EpisodeResult):
                        running -= 1
                        self._keep(event)
                    elif isinstance(event, Interrupted):
                        self._keep_interrupted(event)
                    elif not event.observed or self._policy.observe(event.conversation, event.observed):
                        waiting.append(event)
                    else:
                        threads.submit(self._guarded, self._end, event)
                if asking := [waiting.popleft() for _ in range(min(self._policy.batch, len(waiting)))]:
                    for live, calls in zip(asking, self._ask(asking), strict=True):
                        threads.submit(self._guarded, self._act, live, calls)
        finally:
            self._stop(threads)

    def _claim(self) -> None:
        """Be the one that runs this evaluation; whether another lives its next heartbeat tells, or that none comes."""
        run_id = self._identity.run_id
        left = self._pool.claim_left_seconds(run_id)
        if left:
            logger.warning("looking for at most %.0f s whether the process that began this is gone", left)
        while not self._pool.claim_run(run_id):
            self._check()
            time.sleep(_BEAT_LOOK_SECONDS)
            before, left = left, self._pool.claim_left_seconds(run_id)
            if left > before:
                raise _in_use(run_id)

    def _begin(self, threads: ThreadPoolExecutor, planned: Planned) -> None:
        seed = self._identity.episode_seed(planned.task, planned.sample)
        conversation = self._policy.begin(self._tasks[planned.task], seed)
        threads.submit(self._guarded, self._start, planned, conversation)

    def _wait(self, *, block: bool) -> list[_Event[C]]:
        """All events that are there already; with `block` at least one."""
        events: list[_Event[C]] = []
        absence = Absence(self._pool, self._patience)
        while block and not events:
            try:
                events.append(self._events.get(timeout=_LOOK_SECONDS))
            except queue.Empty:
                self._check()
                self._require_workers(absence)
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def _require_workers(self, absence: Absence) -> None:
        if any(live.ready for live in list(self._live.values())):
            return  # a worker that drains takes no more, and finishes what it has
        if (error := absence.problem()) is not None:
            raise NeverFits(f"{error}; then the same evaluation goes on from here")

    def _ask(self, asking: Sequence[_Live[C]]) -> list[list[ToolCall]]:
        turns = self._policy.respond([live.conversation for live in asking])
        now = time.monotonic()
        for live in asking:
            live.generation_seconds += now - live.waiting_since
        return turns

    def _stop(self, threads: ThreadPoolExecutor) -> None:
        """Cancel what still runs and wait for it; results that came meanwhile are kept."""
        self._stopping.set()
        for live in list(self._live.values()):
            _cancel(live.episode)
        threads.shutdown(cancel_futures=True)  # calls on their way return as soon as their episode has ended
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, EpisodeResult) and event.outcome not in _INTERRUPTED:
                self._keep(event)
            elif isinstance(event, EpisodeResult):
                self._keep_interrupted(Interrupted(episode_id=event.episode_id, cost_picousd=event.cost_picousd))
            elif isinstance(event, Interrupted):
                self._keep_interrupted(event)
        for live in self._live.values():
            episode_id = live.episode.episode_id
            try:
                live.episode.close()
                settled = self._pool.ledger.receipt(episode_id)
            except FarmError as error:
                logger.error("not closed: %s", error, extra={"episode": episode_id})
                continue
            if settled is None:
                continue
            if settled.receipt.outcome in _CUT_SHORT:
                self._keep_interrupted(Interrupted(episode_id=episode_id, cost_picousd=settled.cost_picousd))
            else:  # it had ended by itself: the next start would find its receipt and count its cost again
                self._keep(self._result(live, settled))

    # in the threads

    def _guarded(self, step: Callable[..., _Live[C] | EpisodeResult], *arguments: object) -> None:
        try:
            event: _Event[C] = step(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the collecting thread
            event = error
        if isinstance(event, _Live):
            event.waiting_since = time.monotonic()
        self._events.put(event)

    def _start(self, planned: Planned, conversation: C) -> _Live[C] | EpisodeResult:
        while (left := self._left_behind(planned)) is not None:
            if isinstance(left, EpisodeResult):
                return left
            planned = left
        episode = self._pool.submit(
            self._tasks[planned.task],
            episode_id=self._identity.episode_id(planned.task, planned.sample, planned.retry),
            group_id=f"{self._identity.run_id}-{planned.task}",
            budgets=self._identity.budgets,
        )
        live = _Live(planned, episode, conversation)
        self._live[episode.episode_id] = live
        if self._stopping.is_set():  # the others were cancelled before this one was known
            _cancel(episode)
        try:
            episode.reset()
        except (EpisodeAborted, EpisodeClosed):
            return self._end(live)
        live.ready = True
        return live

    def _left_behind(self, planned: Planned) -> EpisodeResult | Planned | None:
        """What an interrupted evaluation left of this episode: its result, the next one to run instead, or nothing."""
        episode_id = self._identity.episode_id(planned.task, planned.sample, planned.retry)
        if not self._pool.ledger.knows(episode_id):
            return None
        if self._pool.ledger.receipt(episode_id) is None:
            if not self._pool.claim_run(self._identity.run_id):  # this process stood still for long
                raise _in_use(self._identity.run_id)
            logger.info("ending what an interrupted evaluation left", extra={"episode": episode_id})
            self._pool.submit(self._tasks[planned.task], episode_id=episode_id).close()
        settled = self._pool.ledger.receipt(episode_id)
        if settled is None:
            raise FarmError(f"{episode_id} has a row and no receipt: look at rollout-farm status")
        if settled.receipt.outcome in _CUT_SHORT:
            self._events.put(Interrupted(episode_id=episode_id, cost_picousd=settled.cost_picousd))
            return Planned(planned.task, planned.sample, planned.retry + 1)
        return EpisodeResult.of(settled, None, task=planned.task, sample=planned.sample, retry=planned.retry)

    def _act(self, live: _Live[C], calls: Sequence[ToolCall]) -> _Live[C] | EpisodeResult:
        if not calls:
            return self._end(live)
        live.observed = []
        for call in calls:
            try:
                live.observed.append((call.name, _perform(live.episode, call)))
            except (EpisodeAborted, EpisodeClosed):
                return self._end(live)
            if call.name == "submit" and call.arguments == {}:
                return self._end(live)
        return live

    def _end(self, live: _Live[C]) -> EpisodeResult:
        """Collect the reward; without a submission a healthy episode ends at zero here."""
        try:
            live.episode.reward()
        except EpisodeAborted as error:
            logger.warning("no score: %s", error, extra={"episode": live.episode.episode_id})
        settled = self._pool.ledger.receipt(live.episode.episode_id)
        assert settled is not None, "reward() returns or raises after the receipt"
        del self._live[live.episode.episode_id]
        self._pool.forget(live.episode)
        return self._result(live, settled)

    def _result(self, live: _Live[C], settled: SettledReceipt) -> EpisodeResult:
        usage = self._policy.usage(live.conversation).model_copy(update={"generation_seconds": live.generation_seconds})
        where = live.planned
        return EpisodeResult.of(settled, usage, task=where.task, sample=where.sample, retry=where.retry)


def _cancel(episode: Episode) -> None:
    try:
        episode.cancel()
    except FarmError as error:
        logger.error("not cancelled: %s", error, extra={"episode": episode.episode_id})


def _in_use(run_id: str) -> FarmError:
    return FarmError(f"another process runs this evaluation now ({run_id}): wait for it, or give another --label")


def _perform(episode: Episode, call: ToolCall) -> str:
    """What the model is shown of one call; what it got wrong is text for it, in the words of a training."""
    try:
        if (wrong := _wrong(call)) is not None:
            return str({"error": wrong})
        return str(episode.terminal(call.arguments["command"])) if call.name == "terminal" else episode.submit()
    except CommandRefused as error:
        return str({"error": str(error)})


def _wrong(call: ToolCall) -> str | None:
    """What is wrong with a call: the tool is not there, or does not take these arguments; None when it does.

    The tools of TOOLS say it themselves, as those of a training do: without an episode, a right call is a FarmError.
    """
    tool = next((tool for tool in TOOLS if tool.__name__ == call.name), None)
    if tool is None:
        return f"Tool {call.name} not found."
    try:
        tool(**call.arguments)
    except TypeError as error:
        return str(error)
    except FarmError:
        return None
    return None
