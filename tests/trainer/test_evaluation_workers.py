"""An evaluation on a farm without workers: it gives up and goes on later; a worker that only drains is waited for."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.exit_codes import ExitCode
from orchestrator.pool import Pool
from orchestrator.vocabulary import Outcome
from tests.learning.tasks import task
from tests.support.evaluations import an_identity
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.processes import Marked, worker_environment
from tests.support.waiting import wait_until
from trainer.evaluation.collection import Collector, plan
from trainer.evaluation.identity import TaskIdentity
from trainer.evaluation.policies import ScriptPolicy, ToolCall
from trainer.evaluation.results import EpisodeResult

TASK = task("high")


class Draining(ScriptPolicy):
    """Has the only worker told to stop, and then takes its time."""

    def __init__(self, field: Field) -> None:
        super().__init__("right")
        self._field = field
        self._stopped = False

    def respond(self, conversations: Sequence[Any]) -> list[list[ToolCall]]:
        turns = super().respond(conversations)
        if self._stopped:
            return turns
        self._stopped = True
        self._field.workers[0].process.terminate()
        wait_until(lambda: not self._field.farm.limiter.capacity().live_slots, description="no slot is live")
        return [[*[ToolCall("terminal", {"command": "sleep 1.5"})] * 2, *calls] for calls in turns]


def test_without_a_worker_an_evaluation_gives_up_and_goes_on_when_one_has_come(ground: Ground, tmp_path: Path) -> None:
    with open_field(ground, own_database=True, drain_seconds=60) as field:
        command = ["evaluate", "weekly-sales", "--script", "repair", "--output", "out", "--worker-patience", "0.2"]
        runs = []

        def run(number: int) -> Marked:
            started = Marked(
                [sys.executable, "-m", "deploy.cli", *command, "--episodes", "2"],
                environment=worker_environment(field.settings),
                cwd=tmp_path,
                output=tmp_path / f"stdout-{number}",
            )
            field.exits.callback(started.end)
            runs.append(started.wait(60))
            return started

        said = " ".join(run(1).stderr.split())
        assert runs == [ExitCode.CAPACITY], said
        assert "no worker has been alive for 0.2 s: start `rollout-farm worker`" in said
        assert "the same evaluation goes on from here" in said
        assert field.farm.queue.depth() == 0
        field.worker()
        report = json.loads(run(2).stdout)
        assert (runs[1], report["scored"], report["missing"]) == (ExitCode.OK, 2, 0)
        with Pool(field.settings) as pool:  # what a worker has that takes no more is waited for
            identity = an_identity(tasks=(TaskIdentity.of(TASK),), episodes=1, budgets=pool.settings.budgets)
            found: list[EpisodeResult] = []
            collector = Collector(
                pool, identity, [TASK], Draining(field), keep=found.append, worker_patience_seconds=0.2
            )
            collector.collect(plan(identity, [], retry_failed=False), parallel=1)
            assert [result.outcome for result in found] == [Outcome.SOLVED]
            pool.redis.close()
