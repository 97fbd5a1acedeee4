"""TRL's asynchronous GRPO on the farm: a rollout worker whose child makes its sessions with our factory.

    worker = FarmRolloutWorker(factory, model_name=..., dataset=rows, processing_class=tokenizer, eos_token_ids=[...],
                               num_generations=8, max_inflight_tasks=16, max_tokens=config.max_completion_length,
                               max_tool_calling_iterations=config.max_tool_calling_iterations)
    AsyncGRPOTrainer(model=..., train_dataset=rows, args=config, rollout_worker=worker).train()

What always holds: the factory is pickled into the spawned child and connects there; a child that has failed or died is
an error in the trainer at its next look, never a wait for ever. One thread of the child drives one session, so
`max_inflight_tasks` is how many episodes are in the farm at once: more than there are slots only queue.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from openenv.core.harness import HarnessAdapter, MCPHarnessAdapter  # type: ignore[import-untyped]
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker
from trl.trainer.utils import get_callable_name, is_async_callable

from trainer.answers import accept_any_answer
from trainer.evaluation.call_reading import refuse_misread_calls
from trainer.sessions import PoolSessionFactory

_LEAVE_SECONDS = 60.0
"""For the child to close its sessions: what each is in the middle of, and the deletion of its sandbox."""

_SAMPLING = {"max_tokens": 512, "request_timeout": 600}
"""What TRL's loop is given where the caller says nothing: its own 32 tokens cut a tool call short."""


class FarmRolloutWorker(HarnessRolloutWorker):  # type: ignore[misc]
    """TRL's HarnessRolloutWorker over a PoolSessionFactory; other arguments are TRL's own.

    It does not see the trainer's AsyncGRPOConfig: hand over what both should know. `max_tokens` is the longest answer
    of a turn, 512 where nothing is said; `request_timeout` is how many seconds the model server has for it, 600 where
    nothing is said (TRL's loop alone would take 32 and 120). `max_tool_calling_iterations` is how many turns an
    episode has, 8 for None.

    Too many failed sessions, or a whole window of them that TRL closed unfinished because the model's side failed, end
    the child, and `AsyncGRPOTrainer.train` raises RuntimeError: the exception chained to it has the counts and the
    most frequent cause.
    """

    def __init__(
        self, factory: PoolSessionFactory, *, harness_adapter: HarnessAdapter | None = None, **loop: Any
    ) -> None:
        refuse_misread_calls(loop.get("processing_class"), "processing_class")
        accept_any_answer(loop.get("processing_class"), objects_only=True)
        super().__init__(
            harness_session_factory=functools.partial(_given, factory),
            harness_adapter=harness_adapter or MCPHarnessAdapter(),
            **{**_SAMPLING, **loop, "reward_funcs": [_only_scored(func) for func in loop.get("reward_funcs") or []]},
        )

    _process: Any  # the child, TRL's own

    def check_health(self, stale_after_s: float) -> None:
        """As TRL's, and at once when the child was killed; TRL itself waits until its heartbeat is old."""
        if self._process is not None and not self._process.is_alive() and not self._failed_event.is_set():
            raise RuntimeError(
                f"the rollout worker's process has ended with {self._process.exitcode} (killed? out of memory?); the "
                "farm ends its episodes as trainer_lost: start the training again"
            )
        super().check_health(stale_after_s)

    def stop(self) -> None:
        """As TRL's, with time for the child to close its sessions, and without waiting for one that has died.

        In trl 1.16 a watcher in the child waits on the stop event; when the child died, `Event.set` waits for that
        watcher to wake up, for ever, and `train` never shows the error that the child died of. So a failed child is
        not signalled, and any other by a thread that may be left waiting.
        """
        child = self._process
        if child is not None:
            if not self._failed_event.is_set():
                threading.Thread(target=self._stop_event_mp.set, name="stop rollouts", daemon=True).start()
            child.join(_LEAVE_SECONDS)
            if child.is_alive():
                child.kill()  # the farm ends its episodes: their trainer is lost
                child.join()
            self._process = None
        super().stop()


class _OnlyScored:
    """A reward function that says None for a session without a score, whose completion TRL leaves empty.

    TRL leaves a rollout out only when all of its rewards are None. It can be pickled where the function can.
    """

    def __init__(self, func: Any) -> None:
        self._func = func
        self.__name__ = get_callable_name(func)

    def __call__(self, *, completion_ids: list[list[int]], **given: Any) -> Any:
        return _scored(completion_ids, self._func(completion_ids=completion_ids, **given))


class _OnlyScoredLater(_OnlyScored):
    async def __call__(self, *, completion_ids: list[list[int]], **given: Any) -> Any:
        return _scored(completion_ids, await self._func(completion_ids=completion_ids, **given))


def _only_scored(func: Any) -> _OnlyScored:
    return (_OnlyScoredLater if is_async_callable(func) else _OnlyScored)(func)


def _scored(completion_ids: list[list[int]], rewards: Any) -> list[float | None]:
    return [reward if ids else None for ids, reward in zip(completion_ids, rewards, strict=True)]


def _given(factory: PoolSessionFactory) -> PoolSessionFactory:
    """What TRL calls in the child to get the factory."""
    return factory
