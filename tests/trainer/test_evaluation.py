"""Evaluations on a real farm: parallel, resumable, the same again, and failures are no scores."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cost import usd
from orchestrator.errors import FarmError
from orchestrator.pool import Pool
from orchestrator.tasks import Task
from orchestrator.vocabulary import Outcome
from tests.learning.policy import TinyPolicy, tiny_policy, warm_start
from tests.learning.tasks import BUGS, task
from tests.support.evaluations import an_identity
from tests.support.farm import Field
from tests.support.waiting import wait_until
from trainer.evaluation.chat_model import ChatModel
from trainer.evaluation.collection import Collector, Planned, plan
from trainer.evaluation.identity import Identity, Sampling, TaskIdentity
from trainer.evaluation.policies import Policy, ScriptPolicy, ToolCall
from trainer.evaluation.report import summarize
from trainer.evaluation.results import EpisodeResult, Interrupted, ResultsFile, Usage, read_evaluation
from trainer.evaluation.tools import TOOLS

TASKS = [task(bug) for bug in BUGS]
SAMPLING = Sampling(max_completion_tokens=64, max_turns=5)


@pytest.fixture(scope="module")
def taught() -> TinyPolicy:
    policy = tiny_policy(0)
    warm_start(policy, seed=0)
    return policy


@pytest.fixture
def model(taught: TinyPolicy) -> ChatModel:
    return ChatModel(taught.model, taught.tokenizer, SAMPLING, tools=TOOLS)


def identity_of(pool: Pool, *, tasks: Sequence[Task] = TASKS, label: str, **changes: Any) -> Identity:
    identities = tuple(TaskIdentity.of(it) for it in tasks)
    return an_identity(tasks=identities, label=label, budgets=pool.settings.budgets, sampling=SAMPLING, **changes)


def collected(
    pool: Pool,
    identity: Identity,
    policy: Policy[Any],
    planned: Sequence[Planned] | None = None,
    *,
    tasks: Sequence[Task] = TASKS,
    parallel: int = 4,
) -> dict[tuple[int, int], EpisodeResult]:
    """The results of what was planned, by task and sample."""
    results: list[EpisodeResult] = []
    left = plan(identity, [], retry_failed=False) if planned is None else planned
    Collector(pool, identity, tasks, policy, keep=results.append).collect(left, parallel=parallel)
    assert len(results) == len(left)
    return {(result.task, result.sample): result for result in results}


def turns_of(result: EpisodeResult) -> int:
    assert result.usage is not None
    return result.usage.turns


# scripts


@pytest.mark.parametrize(("script", "outcome"), [("right", Outcome.SOLVED), ("both", Outcome.WRONG_ANSWER)])
def test_a_script_is_run_in_every_task(pool: Pool, farm: Field, script: str, outcome: Outcome) -> None:
    policy = ScriptPolicy(script)
    found = collected(pool, identity_of(pool, label=script, subject=policy.subject), policy)
    assert [result.outcome for result in found.values()] == [outcome] * 4
    assert {result.usage.turns for result in found.values() if result.usage} == {3}
    assert all(result.cost_picousd > 0 and result.episode_seconds > 0 for result in found.values())
    assert found[0, 0].resources == ("policy 2 vCPU 512 MiB", "verifier 2 vCPU 512 MiB")


class Together:
    """A policy that does not go on before `count` episodes are live."""

    batch = 3

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: set[int] = set()
        self.most = 0

    def begin(self, task: Task, seed: int) -> int:
        return seed

    def respond(self, conversations: Sequence[int]) -> list[list[ToolCall]]:
        self._waiting |= set(conversations)
        self.most = max(self.most, len(self._waiting))
        enough = len(self._waiting) >= self._count
        return [
            [ToolCall("submit" if enough else "terminal", {} if enough else {"command": "true"})] for _ in conversations
        ]

    def observe(self, conversation: int, results: Sequence[tuple[str, str]]) -> bool:
        return True

    def usage(self, conversation: int) -> Usage:
        return Usage(turns=0)


def test_episodes_are_live_together(pool: Pool, farm: Field) -> None:
    policy = Together(4)
    found = collected(pool, identity_of(pool, label="together"), policy)
    assert policy.most == 4
    assert len(found) == 4


# models


def test_a_model_acts_in_its_episodes(pool: Pool, farm: Field, model: ChatModel) -> None:
    found = collected(pool, identity_of(pool, label="model", episodes=4), model)
    assert all(result.reward in (0.0, 1.0) for result in found.values())
    spent = [result.usage for result in found.values() if result.usage is not None]
    assert len(spent) == 8
    assert all(1 <= usage.completion_tokens == usage.turns <= 6 for usage in spent)  # one token is one turn here
    assert len({result.tool_calls for result in found.values()}) > 1  # it samples


def test_an_episode_goes_the_same_way_whoever_is_in_its_batch(pool: Pool, farm: Field, model: ChatModel) -> None:
    first = collected(pool, identity_of(pool, label="batched", episodes=3), model)
    alone = collected(pool, identity_of(pool, label="alone", episodes=3), model, parallel=1)
    for place, result in first.items():
        assert (result.outcome, result.tool_calls, turns_of(result)) == (
            alone[place].outcome,
            alone[place].tool_calls,
            turns_of(alone[place]),
        )


WRONG_CALLS = [
    ToolCall("bash", {"command": "ls"}),
    ToolCall("terminal", {"cmd": "ls"}),
    ToolCall("terminal", {"command": 7}),
    ToolCall("terminal", {"command": "\ud800"}),
    ToolCall("submit", {"answer": "x"}),
    ToolCall("terminal", {"command": "x" * 200_000}),
    ToolCall("terminal", "ls"),
    ToolCall("terminal", ["command"]),
    ToolCall("submit", []),
    ToolCall("submit", 0),
]


class Misled(ScriptPolicy):
    """Calls tools that do not exist, in ways that they do not take, before it does the right thing."""

    def __init__(self) -> None:
        super().__init__("right")
        self.told: list[str] = []

    def respond(self, conversations: Sequence[Any]) -> list[list[ToolCall]]:
        return super().respond(conversations) if self.told else [WRONG_CALLS]

    def observe(self, conversation: Any, results: Sequence[tuple[str, str]]) -> bool:
        self.told = self.told or [text for _, text in results]
        return True


def test_a_call_that_is_wrong_is_text_for_the_model_and_no_failure(pool: Pool, farm: Field) -> None:
    policy = Misled()
    found = collected(pool, identity_of(pool, label="misled"), policy, [Planned(0, 0, 0)])
    assert found[0, 0].outcome is Outcome.SOLVED
    assert len(policy.told) == len(WRONG_CALLS)
    assert all(text.startswith("{'error': ") for text in policy.told)
    assert "Tool bash not found." in policy.told[0]


# failures


class Abandoning(ScriptPolicy):
    """Has the sandbox of its first episode deleted after its first command."""

    def __init__(self, farm: Field) -> None:
        super().__init__("right")
        self._farm = farm
        self._deleted = False

    def observe(self, conversation: Any, results: Sequence[tuple[str, str]]) -> bool:
        if not self._deleted:
            self._deleted = True
            for row in self._farm.provider.list({}):
                self._farm.provider.delete(row.sandbox_id)
        return True


def test_a_lost_sandbox_is_a_failure_without_a_score_and_can_be_tried_again(
    pool: Pool, farm: Field, tmp_path: Path
) -> None:
    identity = identity_of(pool, label="lost", tasks=TASKS[:1])
    with ResultsFile(tmp_path, identity) as file:

        def collect(policy: ScriptPolicy, *, retry_failed: bool) -> None:
            left = plan(identity, file.results, retry_failed=retry_failed)
            Collector(pool, identity, TASKS[:1], policy, keep=file.add).collect(left, parallel=1)

        collect(Abandoning(farm), retry_failed=False)
        lost, fine = file.results
        assert (lost.outcome, lost.reward) == (Outcome.SANDBOX_LOST, None)
        assert fine.outcome is Outcome.SOLVED
        collect(ScriptPolicy("right"), retry_failed=True)
    again = read_evaluation(tmp_path).results[-1]
    assert (again.sample, again.retry, again.outcome) == (lost.sample, 1, Outcome.SOLVED)


# interruptions


class Stopping(ScriptPolicy):
    """Is interrupted, as by Ctrl-C, when it is asked for the n-th time."""

    def __init__(self, turns: int) -> None:
        super().__init__("right")
        self._left = turns

    def respond(self, conversations: Sequence[Any]) -> list[list[ToolCall]]:
        self._left -= len(conversations)
        if self._left < 0:
            raise KeyboardInterrupt
        return super().respond(conversations)


def test_an_interrupted_evaluation_leaves_no_sandbox_and_goes_on(pool: Pool, farm: Field, tmp_path: Path) -> None:
    identity = identity_of(pool, label="interrupted", episodes=4)
    with ResultsFile(tmp_path, identity) as file:
        with pytest.raises(KeyboardInterrupt):
            Collector(
                pool, identity, TASKS, Stopping(10), keep=file.add, keep_interrupted=file.add_interrupted
            ).collect(plan(identity, [], retry_failed=False), parallel=4)
    assert farm.provider.list({}) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("evaluation")]
    done = read_evaluation(tmp_path)
    assert done.missing() >= 5  # ten turns make three episodes at most
    with Pool(farm.settings, run_id=identity.run_id) as another, ResultsFile(tmp_path, identity) as file:
        left = plan(identity, file.results, retry_failed=False)
        assert len(left) == done.missing()
        Collector(another, identity, TASKS, ScriptPolicy("right"), keep=file.add).collect(left, parallel=4)
    whole = read_evaluation(tmp_path)
    assert whole.missing() == 0
    assert [result.outcome for result in whole.results] == [Outcome.SOLVED] * 8
    assert max(result.retry for result in whole.results) == 1  # what was cancelled ran again under an id of its own
    ids = [identity.episode_id(task, sample, retry) for task in range(2) for sample in range(4) for retry in range(2)]
    receipts = [settled for name in ids if (settled := farm.farm.ledger.receipt(name)) is not None]
    assert len(receipts) > 8
    assert summarize(whole).cost.total_usd == usd(sum(settled.cost_picousd for settled in receipts))
    assert summarize(whole).cost.interrupted_usd > 0


def test_results_of_a_lost_file_are_found_in_their_receipts(pool: Pool, farm: Field) -> None:
    identity = identity_of(pool, label="found")
    first = collected(pool, identity, ScriptPolicy("right"))
    with Pool(farm.settings, run_id=identity.run_id) as another:
        again = collected(another, identity, ScriptPolicy("right"))
        assert another.submitted == []
    for place, result in again.items():
        assert result == first[place].model_copy(update={"usage": None})


def test_what_a_killed_evaluation_left_running_is_ended_and_run_anew(pool: Pool, farm: Field) -> None:
    identity = identity_of(pool, label="killed", tasks=TASKS[:1], episodes=2)
    killed = Pool(farm.settings, run_id=identity.run_id)
    left_behind = [killed.submit(TASKS[0], episode_id=identity.episode_id(0, sample)) for sample in range(2)]
    for episode in left_behind:
        episode.reset()
        killed.forget(episode)
    killed.close()  # which now only ends the heartbeat, as a kill does: the last claim still counts for a while
    assert farm.farm.presence.claim_run(identity.run_id, killed.trainer_id)
    found: list[EpisodeResult] = []
    cut: list[Interrupted] = []
    policy = ScriptPolicy("right")
    collector = Collector(pool, identity, TASKS[:1], policy, keep=found.append, keep_interrupted=cut.append)
    collector.collect(plan(identity, [], retry_failed=False), parallel=2)
    assert [(it.retry, it.outcome) for it in found] == [(1, Outcome.SOLVED)] * 2
    assert {it.episode_id for it in cut} == {episode.episode_id for episode in left_behind}
    assert all(it.cost_picousd > 0 for it in cut)
    ended = {episode.wait(10).outcome for episode in left_behind}
    assert ended <= {Outcome.CANCELLED, Outcome.TRAINER_LOST}
    killed.redis.close()


def test_an_evaluation_that_another_process_runs_is_left_to_it(pool: Pool, farm: Field) -> None:
    identity = identity_of(pool, label="twice", tasks=TASKS[:1], episodes=1)
    with Pool(farm.settings, run_id=identity.run_id) as other:
        assert other.claim_run(identity.run_id)
        theirs = other.submit(TASKS[0], episode_id=identity.episode_id(0, 0))
        theirs.reset()
        with Pool(farm.settings, run_id=identity.run_id) as ours:
            with pytest.raises(FarmError, match=r"another process runs this evaluation now.*--label"):
                collected(ours, identity, ScriptPolicy("right"), tasks=TASKS[:1], parallel=1)
            assert ours.submitted == []
        assert theirs.receipt() is None
        assert theirs.reward() == 0.0
        other.release_run(identity.run_id)
        found = collected(pool, identity, ScriptPolicy("right"), tasks=TASKS[:1], parallel=1)
    assert found[0, 0].outcome is Outcome.NOT_SUBMITTED  # its receipt is there


def test_a_process_that_lost_its_claim_leaves_the_others_episodes_alone(pool: Pool, farm: Field) -> None:
    identity = identity_of(pool, label="paused", tasks=TASKS[:1], episodes=1)
    planned = plan(identity, [], retry_failed=False)[0]
    with Pool(farm.settings, run_id=identity.run_id) as other, Pool(farm.settings, run_id=identity.run_id) as paused:
        stood_still = Collector(paused, identity, TASKS[:1], ScriptPolicy("right"), keep=lambda result: None)
        assert other.claim_run(identity.run_id), "its claim ran out while it stood still"
        theirs = other.submit(TASKS[0], episode_id=identity.episode_id(0, 0))
        theirs.reset()
        with pytest.raises(FarmError, match="another process runs this evaluation now"):
            stood_still._left_behind(planned)
        assert theirs.receipt() is None
        assert theirs.reward() == 0.0
        other.release_run(identity.run_id)


def test_of_two_that_begin_an_evaluation_at_once_one_runs_all_of_it(farm: Field, pool: Pool) -> None:
    class Unhurried(ScriptPolicy):
        def respond(self, conversations: Sequence[Any]) -> list[list[ToolCall]]:
            time.sleep(0.5)
            return super().respond(conversations)

    identity = identity_of(pool, label="at-once", episodes=4)
    results: dict[str, int] = {}
    refused: list[str] = []

    def run(name: str) -> None:
        with Pool(farm.settings, run_id=identity.run_id) as ours:
            try:
                results[name] = len(collected(ours, identity, Unhurried("right"), parallel=4))
            except FarmError as error:
                refused.append(str(error))
                results[name] = len(ours.submitted)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results.values()) == [0, 8]
    assert "another process runs this evaluation now" in "".join(refused)


def test_a_failing_policy_ends_the_evaluation_and_its_episodes(pool: Pool, farm: Field) -> None:
    class Failing(ScriptPolicy):
        def observe(self, conversation: Any, results: Sequence[tuple[str, str]]) -> bool:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        collected(pool, identity_of(pool, label="failing"), Failing("right"))
    wait_until(lambda: farm.provider.list({}) == [], description="no sandbox is left")
