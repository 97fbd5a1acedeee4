"""When a policy is asked for the turns of an evaluation's episodes."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.pool import Pool
from orchestrator.tasks import Task
from orchestrator.vocabulary import Outcome
from tests.learning.tasks import BUGS, task
from tests.support.evaluations import an_identity
from tests.support.farm import Field
from tests.support.waiting import wait_until
from trainer.evaluation.collection import Collector, plan
from trainer.evaluation.identity import TaskIdentity
from trainer.evaluation.policies import ToolCall
from trainer.evaluation.results import EpisodeResult, Usage


class Beginning:
    """The beginning of one episode."""


class OneByOne:
    """Answers one episode at a time, none before the one answered last has what its command gave."""

    batch = 1

    def __init__(self) -> None:
        self.collector: Collector[Beginning] | None = None
        self._last: Beginning | None = None
        self.asked: list[int] = []

    def begin(self, task: Task, seed: int) -> Beginning:
        return Beginning()

    def respond(self, conversations: Sequence[Beginning]) -> list[list[ToolCall]]:
        if not self.asked:  # from now on several wait
            wait_until(self._all_wait, description="all episodes wait for an answer")
        self.asked.append(len(conversations))
        wait_until(self._carried_out, description="the last answer is carried out before the next is asked for")
        self._last = conversations[-1]
        return [[ToolCall("terminal", {"command": "true"})] for _ in conversations]

    def _all_wait(self) -> bool:
        assert self.collector is not None
        return sum(live.waiting_since > 0 for live in self.collector._live.values()) == 4

    def _carried_out(self) -> bool:
        assert self.collector is not None
        return all(live.observed for live in self.collector._live.values() if live.conversation is self._last)

    def observe(self, conversation: Beginning, results: Sequence[tuple[str, str]]) -> bool:
        return False

    def usage(self, conversation: Beginning) -> Usage:
        return Usage(turns=1)


def test_what_the_policy_says_is_carried_out_before_it_is_asked_for_others(pool: Pool, farm: Field) -> None:
    policy = OneByOne()
    tasks = [task(bug) for bug in BUGS]
    identities = tuple(TaskIdentity.of(it) for it in tasks)
    identity = an_identity(tasks=identities, label="one-by-one", budgets=pool.settings.budgets)
    results: list[EpisodeResult] = []
    policy.collector = Collector(pool, identity, tasks, policy, keep=results.append)
    policy.collector.collect(plan(identity, [], retry_failed=False), parallel=4)
    assert policy.asked == [1] * 4
    assert {result.outcome for result in results} == {Outcome.NOT_SUBMITTED}
