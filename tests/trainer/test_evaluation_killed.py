"""An evaluation that is killed or stopped in mid-episode and goes on: no score is invented, no cost counted twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cost import usd
from orchestrator.pool import Pool
from tests.support.farm import Field
from tests.support.waiting import wait_until
from tests.trainer.test_evaluation import TASKS, identity_of
from trainer.evaluation.collection import Collector, plan
from trainer.evaluation.identity import Identity
from trainer.evaluation.policies import ScriptPolicy
from trainer.evaluation.report import summarize
from trainer.evaluation.results import Evaluation, ResultsFile, read_evaluation


class Slow(ScriptPolicy):
    """Needs so long for each answer, well within the window."""

    def __init__(self, seconds: float) -> None:
        super().__init__("right")
        self._seconds = seconds

    def respond(self, conversations: Sequence[Any]) -> Any:
        time.sleep(self._seconds)
        return super().respond(conversations)


class Stopped(ScriptPolicy):
    """Thinks until the windows of the others are over, and is interrupted then."""

    batch = 1

    def respond(self, conversations: Sequence[Any]) -> Any:
        time.sleep(4.0)
        raise KeyboardInterrupt


def asked(pool: Pool, label: str, *, window: float) -> Identity:
    identity = identity_of(pool, label=label, tasks=TASKS, episodes=2)
    budgets = identity.budgets.model_copy(update={"policy_window_seconds": window})
    return identity.model_copy(update={"budgets": budgets})


def evaluate(farm: Field, identity: Identity, policy: ScriptPolicy, directory: Path) -> Evaluation:
    with Pool(farm.settings, run_id=identity.run_id) as pool, ResultsFile(directory, identity) as file:
        collector = Collector(pool, identity, TASKS, policy, keep=file.add, keep_interrupted=file.add_interrupted)
        collector.collect(plan(identity, file.results, retry_failed=False), parallel=4)
    return read_evaluation(directory)


def test_a_killed_evaluations_episodes_are_no_zeros(farm: Field, pool: Pool, tmp_path: Path) -> None:
    """Their windows end before the loss of their trainer is noticed, though the model had time left."""
    identity = asked(pool, "killed", window=5.0)
    child = os.fork()
    if child == 0:
        try:
            evaluate(farm, identity, Slow(3.0), tmp_path)
        finally:
            os._exit(1)
    try:
        wait_until(lambda: len(farm.provider.list({})) == 4, description="four are live", seconds=20)
        time.sleep(1.0)  # it thinks
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    wait_until(lambda: farm.provider.list({}) == [], description="the farm has ended them", seconds=40)
    summary = summarize(evaluate(farm, identity, ScriptPolicy("right"), tmp_path))
    assert summary.score is not None
    assert (summary.score.value, summary.failures.count) == (1.0, 0)


def test_an_episode_that_ended_before_the_interrupt_costs_once(farm: Field, pool: Pool, tmp_path: Path) -> None:
    identity = asked(pool, "interrupted", window=2.0)
    with pytest.raises(KeyboardInterrupt):
        evaluate(farm, identity, Stopped("right"), tmp_path)
    whole = evaluate(farm, identity, ScriptPolicy("right"), tmp_path)
    names = [identity.episode_id(task, sample, retry) for task in range(2) for sample in range(2) for retry in range(3)]
    paid = sum(settled.cost_picousd for name in names if (settled := pool.ledger.receipt(name)) is not None)
    assert summarize(whole).cost.total_usd == usd(paid)
