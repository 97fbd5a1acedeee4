"""TRL's asynchronous GRPO on the farm: a rollout worker whose child makes its sessions with our factory.

    worker = FarmRolloutWorker(factory, model_name=..., dataset=rows, processing_class=tokenizer, eos_token_ids=[...],
                               num_generations=8, max_inflight_tasks=16)
    AsyncGRPOTrainer(model=..., train_dataset=rows, rollout_worker=worker).train()

What always holds: the factory is pickled into the spawned child and connects there; a child that has failed or died is
an error in the trainer at its next look, never a wait for ever. One thread of the child drives one session, so
`max_inflight_tasks` is how many episodes are in the farm at once: more than there are slots only queue.
"""

from __future__ import annotations

import functools
from typing import Any

from openenv.core.harness import HarnessAdapter, MCPHarnessAdapter  # type: ignore[import-untyped]
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

from trainer.sessions import PoolSessionFactory

_LEAVE_SECONDS = 30.0
"""For a child that has failed to close its sessions."""


class FarmRolloutWorker(HarnessRolloutWorker):  # type: ignore[misc]
    """TRL's HarnessRolloutWorker over a PoolSessionFactory; other arguments are TRL's own.

    Too many failed sessions end the child, and `AsyncGRPOTrainer.train` raises RuntimeError: the exception chained to
    it has the counts and the most frequent cause.
    """

    def __init__(
        self, factory: PoolSessionFactory, *, harness_adapter: HarnessAdapter | None = None, **loop: Any
    ) -> None:
        super().__init__(
            harness_session_factory=functools.partial(_given, factory),
            harness_adapter=harness_adapter or MCPHarnessAdapter(),
            **{"reward_funcs": [], **loop},
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
        """As TRL's, but a child that has failed is waited for and not signalled.

        In trl 1.16 the child's own watcher waits on the stop event; when it died waiting, `Event.set` waits for it to
        wake up, for ever, and `train` never shows the error that the child died of.
        """
        child = self._process
        if child is not None and (self._failed_event.is_set() or not child.is_alive()):
            child.join(_LEAVE_SECONDS)
            if child.is_alive():
                child.kill()
                child.join()
            self._process = None
        super().stop()


def _given(factory: PoolSessionFactory) -> PoolSessionFactory:
    """What TRL calls in the child to get the factory."""
    return factory
