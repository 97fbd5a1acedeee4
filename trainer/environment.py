"""The farm's episodes as TRL environments: what `environment_factory` makes, resets, lets the model use and scores.

    with Pool(settings) as pool, RemoteEpisodes(pool) as episodes:
        FarmGRPOTrainer(..., environment_factory=episodes).train()

What always holds: making one allocates nothing; the model's tools are exactly `terminal(command)` and `submit()`; a
reset enqueues and returns, so that a whole batch starts at once; a batch has all its places reserved before its first
episode is enqueued, and ends as a whole when one of them gets none all the same; what our side lost is remembered and
never becomes a score, also when TRL showed it to the model as text; closing ends every episode begun here, also those
of environments that nobody holds any more.

TRL's GRPOTrainer takes `RemoteEpisodes` too, one call after another; then say `batch_size`, the most of a generation in
training or evaluation (per_device_eval_batch_size is 8 by default): without it nothing is reserved, and a generation of
more is refused. An excluded episode would stay in TRL's loss there, so `exclude` takes FarmGRPOTrainer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Literal

from orchestrator.arguments import require_kind, require_seconds
from orchestrator.connection import redis_border
from orchestrator.episodes import Episode
from orchestrator.errors import (
    CommandRefused,
    EpisodeAborted,
    EpisodeClosed,
    FarmError,
    NeverFits,
    PlacesTaken,
    ReceiptOverdue,
    RedisUnavailable,
)
from orchestrator.pool import Pool, Reservation
from orchestrator.tasks import Task
from orchestrator.vocabulary import EpisodeState, Outcome
from trainer.batches import Batch
from trainer.columns import says_something, task_of

logger = logging.getLogger(__name__)

OnAbort = Literal["raise", "exclude"]
"""What an aborted episode does to the run: end it, or be left out of the training data. Never a zero."""


class RemoteEpisode:
    """One environment of TRL's: reset for each completion, then an episode somewhere on the farm.

    TRL offers every public function but `reset` and `get_reward` to the model, hence the underscores.
    """

    def __init__(self, episodes: RemoteEpisodes) -> None:
        self._episodes = episodes
        self._episode: Episode | None = None
        self._failure: FarmError | None = None
        self._closed = False
        self._reward: float | None = None
        self._excluded = False

    def reset(self, task: str | Mapping[str, Any] | None = None, prompt: Any = None, **columns: Any) -> str | None:
        """Enqueue a fresh episode and return without waiting for its sandbox.

        `task` is the dataset's column of that name: a task as JSON text (`json.dumps`), or as a dict. Returns what TRL
        appends to the prompt: the task's own prompt where the row has none, else nothing. Raises TaskError for a column
        that is no task, CapacityError when the batch cannot be live at once.
        """
        if (before := self._episode) is not None:
            self._cancel()
            if self._ended:
                self._episodes._forget(before)
        parsed = task_of(task)
        if prompt is not None:
            self._episodes._refuse_to_exclude()
        self._episode = None
        self._failure, self._reward = None, None
        self._closed = self._excluded = False
        self._episode = self._episodes._submit(parsed, after=before)
        return None if says_something(prompt) else parsed.prompt

    def terminal(self, command: str) -> str:
        """Run one shell command in the sandbox and return what it printed.

        Files stay between commands, but each command is run by a fresh shell: use absolute paths.

        Args:
            command: The shell command to run.
        """
        if not isinstance(command, str):
            raise TypeError("command has to be a text")
        return str(self._act(lambda episode: episode.terminal(command)))

    def submit(self) -> str:
        """Hand in the work when the task is done. Nothing can be changed after this."""
        said = self._act(lambda episode: episode.submit())
        self._closed = True
        return said

    def get_reward(self) -> float | None:
        """The committed reward in [0, 1]; None for what is excluded from the training data.

        Raises what our side lost: always with the policy `raise`, else only what is no episode's abortion, such as a
        lost Redis.
        """
        self._collect()
        if self._failure is not None:
            if self._episodes.on_abort == "exclude" and isinstance(self._failure, EpisodeAborted):
                return None
            raise self._failure
        return None if self._excluded else self._reward

    def _act(self, call: Callable[[Episode], str]) -> str:
        if self._failure is not None:
            raise self._failure
        if self._episode is None:
            raise FarmError("there is no episode yet: reset comes first")
        if self._closed:
            raise EpisodeClosed("the episode is closed")
        self._episodes._resets_done()
        try:
            return call(self._episode)
        except CommandRefused:
            raise
        except EpisodeClosed:  # its window is over, say: the verdict is nothing for the model to read
            self._closed = True
            raise EpisodeClosed("the episode is closed") from None
        except FarmError as error:
            self._failure = self._explained(error)
            raise self._failure from error

    def _collect(self) -> None:
        """Have the reward here, or the reason why there is none; can be called again."""
        if self._failure is not None or self._reward is not None:
            return
        if self._episode is None:
            raise FarmError("there is no episode to score: reset comes first")
        self._episodes._resets_done()
        try:
            self._reward = self._episode.reward()
        except FarmError as error:
            self._failure = self._explained(error)

    def _explained(self, error: FarmError) -> FarmError:
        if not isinstance(error, EpisodeAborted) or self._episode is None:
            return error
        if error.outcome is Outcome.ADMISSION_TIMEOUT:
            self._episodes._end_others(self._episode, error.detail)
        why = self._episodes._given_up.get(self._episode.episode_id)
        return error if why is None else EpisodeAborted(error.outcome, why)

    @property
    def _ended(self) -> bool:
        """Whether the episode is known to have its receipt."""
        return self._reward is not None or isinstance(self._failure, EpisodeAborted)

    def _cancel(self) -> None:
        """Ask for the end of what still runs."""
        if self._episode is not None and self._reward is None:
            self._episode.cancel()


class RemoteEpisodes:
    """The environment factory: makes RemoteEpisodes, reserves places for their batches, and closes them.

    `wait_seconds` bounds the wait for places that other episodes hold, `start_seconds` an episode's wait in the queue.
    With `exclude` it takes FarmGRPOTrainer: TRL's keeps what is excluded in its loss and in reward functions.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        on_abort: OnAbort = "raise",
        batch_size: int | None = None,
        wait_seconds: float = 300.0,
        start_seconds: float | None = None,
    ) -> None:
        if on_abort not in ("raise", "exclude"):
            raise FarmError(f"on_abort is 'raise' or 'exclude', not {on_abort!r}")
        require_seconds("wait_seconds", wait_seconds)
        require_seconds("start_seconds", start_seconds, or_none=True)
        require_kind("batch_size", batch_size, int, "the episodes of a batch")
        self.pool = pool
        self.on_abort = on_abort
        self._given_up: dict[str, str] = {}
        """Id -> why, of episodes that we ended ourselves for want of a worker or of a place."""
        self._giving_up = threading.Lock()
        self._batch_size = batch_size
        self._wait_seconds = wait_seconds
        self._start_seconds = start_seconds or pool.settings.budgets.reserved_admission_seconds
        self._made: list[RemoteEpisode] = []
        self._batch: Batch | None = None
        self._in_block = False
        self._batches = 0
        self._most_reserved = 0
        """The largest batch that had its places, or could have had them: so many were there once."""

    def __call__(self) -> RemoteEpisode:
        """One more environment; allocates nothing."""
        made = RemoteEpisode(self)
        self._made.append(made)
        return made

    def __enter__(self) -> RemoteEpisodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def batch(
        self,
        size: int,
        *,
        group_size: int = 1,
        first_row: int = 0,
        reserve: Callable[[int], Reservation] | None = None,
    ) -> Iterator[None]:
        """What is reset in this block is one batch of `size` episodes, all of them live at once or none.

        Nothing is reserved before the first reset, and nothing is left open or reserved after the block. `first_row` is
        the batch's first row among those of all processes, `reserve` asks for places in another way than this pool's.
        """
        run, number = self.pool.run_id, self._batches

        def group_of(row: int) -> str:
            return f"{run[:40]}-b{number}-g{(first_row + row) // group_size}"

        self._batch = Batch(size, reserve or self.reserve, group_of)
        self._in_block = True
        with ExitStack() as ending, ExitStack() as undo:
            ending.callback(self._end_block)
            undo.callback(self.cancel)
            yield
            undo.pop_all()

    def _end_block(self) -> None:
        self._in_block = False
        self._end_batch()

    def reserve(self, count: int) -> Reservation:
        """Places for `count` episodes, all or nothing.

        Raises CapacityError: NeverFits at once when so many can never be live together, and only after `wait_seconds`
        when as many were before, since a worker may come back; PlacesTaken after as long.
        """
        ends = time.monotonic() + self._wait_seconds
        while True:
            left = max(0.0, ends - time.monotonic())
            try:
                reservation = self.pool.reserve(count, wait_seconds=left)
            except NeverFits:
                if count > self._most_reserved or not left:
                    raise
                time.sleep(min(1.0, left))
            else:
                self._most_reserved = max(self._most_reserved, count)
                return reservation

    def refuse_too_many(self, count: int) -> None:
        """Raise NeverFits when a batch of `count` can never be live together; neither waits nor keeps places."""
        with suppress(PlacesTaken):
            self.pool.reserve(count).release()
        self._most_reserved = max(self._most_reserved, count)

    def cancel(self) -> None:
        """Ask for the end of every episode that still runs; does not wait, does not raise."""
        for environment in self._made:
            try:
                environment._cancel()
            except FarmError as error:
                logger.error("not cancelled, it ends as trainer_lost when this process has gone: %s", error)
                if isinstance(error, RedisUnavailable):
                    return  # away for one is away for all

    def close(self) -> None:
        """End every episode begun here, wait until they have their receipts, give back what is reserved.

        Can be called again. Never raises: what could not be closed is logged.
        """
        self._end_batch()
        self.cancel()
        began = time.monotonic()
        for environment in self._made:
            episode, environment._episode = environment._episode, None
            if episode is None or environment._reward is not None:
                continue
            try:
                episode.wait(timeout_seconds=max(0.1, began + episode.closing_seconds - time.monotonic()))
            except ReceiptOverdue as error:
                logger.error("still open: %s", error)
            except FarmError as error:
                logger.error("not seen to end: %s", error)
                if isinstance(error, RedisUnavailable):
                    return  # away for one is away for all

    def _submit(self, task: Task, *, after: Episode | None) -> Episode:
        batch = self._batch_after(after)
        if batch is None:
            if not self._most_reserved:
                self.refuse_too_many(1)  # nothing else would say that no worker is there
            return self.pool.submit(task)
        if not batch.episodes:
            self._batches += 1
            if batch.reserve is not None:
                batch.reservation = batch.reserve(batch.size)
            batch.watch = threading.Timer(self._start_seconds, self._give_up_unstarted, [batch])
            batch.watch.daemon = True
            batch.watch.start()
        episode = self.pool.submit(task, group_id=batch.group_of(len(batch.episodes)), reservation=batch.reservation)
        batch.episodes.append(episode)
        return episode

    def _forget(self, episode: Episode) -> None:
        """Hold nothing of an episode that has ended: a long run has any number of them."""
        self.pool.forget(episode)
        self._given_up.pop(episode.episode_id, None)

    def _batch_after(self, before: Episode | None) -> Batch | None:
        """Of an environment's next episode; a batch that is full, or has its last one, is another generation's."""
        batch = self._batch
        if self._batch_size is not None and (batch is None or not batch.takes(before)):
            if batch is not None:
                batch.refuse_more(before)
            self._end_batch()
            self._batch = Batch(self._batch_size, self.reserve)
        return self._batch

    def _refuse_to_exclude(self) -> None:
        """TRL gives a prompt with every reset; its own trainer begins no batch, and masks nothing out."""
        if self.on_abort == "exclude" and not self._in_block:
            raise FarmError(
                "on_abort='exclude' takes FarmGRPOTrainer: TRL's own would keep an aborted episode's completion in its "
                "loss; use that one, on_abort='raise', or in a loop of your own `with episodes.batch(n)`"
            )

    def _resets_done(self) -> None:
        if self._batch is not None:
            self._batch.used = True

    def _end_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.end()

    def _give_up_unstarted(self, batch: Batch) -> None:
        """End what no worker took, its trainer would wait for ever; and with it the rest of a reserved batch."""
        why = "no worker took it in time; see that workers run: rollout-farm status"
        if self._give_up(batch, why, lambda state: state is EpisodeState.QUEUED) and batch.reservation is not None:
            self._give_up(
                batch, f"its batch was not live at once: {why}", lambda state: state is not EpisodeState.FINAL
            )

    def _end_others(self, episode: Episode, detail: str) -> None:
        """A reserved batch is live at once or not at all: one that got no place ends those that hold one."""
        batch = self._batch
        if batch is None or batch.reservation is None or episode not in batch.episodes:
            return
        with self._giving_up:  # all that got none say so at the same time
            if not batch.over:
                batch.over = True
                why = f"its batch could not be live at once: {detail}"
                self._give_up(batch, why, lambda state: state is not EpisodeState.FINAL)

    def _give_up(self, batch: Batch, why: str, wanted: Callable[[EpisodeState], bool]) -> bool:
        """Ask for the end of those in a wanted state; whether there were any."""
        found = False
        for episode in batch.episodes:
            try:
                state = redis_border(self.pool.ledger.state)(episode.episode_id)
                if state is not None and wanted(state):
                    found = True
                    self._given_up[episode.episode_id] = why
                    episode.cancel()
            except FarmError as error:
                logger.error("not given up: %s", error, extra={"episode": episode.episode_id})
                if isinstance(error, RedisUnavailable):
                    return found  # away for one is away for all
        return found


def aborted_outcome(environment: RemoteEpisode) -> Outcome | None:
    """How this environment's episode was aborted; None when it was not."""
    return environment._failure.outcome if isinstance(environment._failure, EpisodeAborted) else None
