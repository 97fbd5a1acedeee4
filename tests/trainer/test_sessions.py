"""Sessions on a real farm: driven by OpenEnv's own adapters and collector, in this process and in a spawned one."""

from __future__ import annotations

import functools
import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openenv.core.harness import (  # type: ignore[import-untyped]
    CLIHarnessAdapter,
    HarnessRolloutResult,
    MCPHarnessAdapter,
)
from openenv.core.harness.collect import CollectRunner, RolloutSerializer  # type: ignore[import-untyped]
from redis import Redis

from deploy.embedded import EmbeddedRedis
from orchestrator.errors import CapacityError, EpisodeClosed, FarmError, InfrastructureLost, RedisUnavailable
from orchestrator.keys import Keys
from orchestrator.tasks import TaskError
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import farm_settings
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.harness import RIGHT, SUBMIT, Call, ScriptedModel, run
from tests.support.policies import weekly_sales
from tests.support.waiting import wait_until
from trainer.session_failures import FailureLimit, TooManyFailures
from trainer.sessions import PoolSession, PoolSessionFactory

pytest_plugins = ["tests.support.farm"]

WRONG: tuple[Call, ...] = (run("ls"), SUBMIT)
NO_TEMPLATE = "no-such-template"


@pytest.fixture(scope="module")
def field(ground: Ground) -> Iterator[Field]:
    """One farm with two workers for the module: four slots."""
    with open_field(ground, own_database=True) as field:
        field.start_worker("w1")
        field.worker("w2")
        yield field


@pytest.fixture
def factory(field: Field) -> Iterator[PoolSessionFactory]:
    with PoolSessionFactory(field.settings, [weekly_sales()], run_id="run-test") as factory:
        yield factory


def collected(factory: PoolSessionFactory, directory: Path, *calls: Call, episodes: int, tasks: list[Any]) -> Any:
    """Let OpenEnv's collector run these calls."""
    runner = CollectRunner(
        session_factory=factory,
        harness_adapter=MCPHarnessAdapter(),
        serializer=RolloutSerializer(directory),
        tasks=tasks,
    )
    return runner.run(model_step=ScriptedModel(*calls), num_episodes=episodes)


def test_the_collector_of_openenv_collects_on_the_farm(
    field: Field, factory: PoolSessionFactory, tmp_path: Path
) -> None:
    right = collected(factory, tmp_path, *RIGHT, episodes=2, tasks=["weekly-sales"] * 2)
    assert (right.num_collected, right.num_failed, right.avg_reward) == (2, 0, 1.0)
    assert collected(factory, tmp_path, *RIGHT, episodes=2, tasks=["weekly-sales"] * 2).num_skipped == 2
    wrong = collected(factory, tmp_path / "wrong", *WRONG, episodes=1, tasks=[weekly_sales()])
    assert (wrong.num_collected, wrong.avg_reward) == (1, 0.0)
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    for record in records:
        metrics = record["verify_metrics"]
        field.check_ended(metrics["episode_id"], Outcome.SOLVED, roles=("policy", "verifier"))
        assert (metrics["session_id"], metrics["run_id"]) == (record["episode_id"], "run-test")
        assert record["messages"][0] == {"role": "user", "content": weekly_sales().prompt}
    assert (factory.counts.open, factory.counts.scored, factory.counts.failed) == (0, 3, 0)


def test_a_session_that_was_never_submitted_is_worth_nothing(
    field: Field, factory: PoolSessionFactory, tmp_path: Path
) -> None:
    assert collected(factory, tmp_path, episodes=1, tasks=["weekly-sales"]).avg_reward == 0.0
    (record,) = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert record["verify_metrics"]["outcome"] == "not_submitted"


def test_what_the_policy_gets_wrong_is_an_answer_and_costs_it_nothing_else(
    field: Field, factory: PoolSessionFactory
) -> None:
    session = factory.create("weekly-sales", seed=3)
    wrong: list[tuple[Any, Any]] = [
        ("python", {"code": "1"}),
        ("reset", {}),
        ("close", {}),
        ("terminal", {}),
        ("terminal", {"command": 7}),
        ("terminal", {"command": "ls", "timeout": "1"}),
        ("submit", {"answer": "x"}),
        run("x" * (field.settings.budgets.command_bytes + 1)),
        run("\ud800"),
        ("terminal", None),
        ("terminal", ["command"]),
        ("terminal", "ls"),
        ("terminal", {1: "ls"}),
        ("submit", None),
        ("submit", []),
        (None, {}),
        (["terminal"], {}),
        ({"name": "terminal"}, {}),
    ]
    for name, arguments in wrong:
        result = session.call_tool(name, arguments)
        assert (result.data, result.done) == (result.error, False)
    failing = session.call_tool(*run("echo no >&2; exit 3"))
    assert (failing.data, failing.error, failing.metadata["exit_code"]) == ("no\n[exit code 3]", None, 3)
    assert type(failing.data) is str, "it travels to the trainer's process"
    assert [session.call_tool(*call).done for call in RIGHT] == [False, True]
    assert session.call_tool(*run("ls")).done, "the episode has ended"
    assert session.verify([]).env_reward == 1.0
    session.close()
    settled = field.check_ended(session.episode.episode_id, Outcome.SOLVED, roles=("policy", "verifier"))
    assert settled.receipt.group_id == "group-3"


def test_an_opaque_harness_reaches_a_session_through_the_bridge(field: Field, factory: PoolSessionFactory) -> None:

    def drive(bridge: Any, session: PoolSession, limits: Any) -> Any:
        answers = []
        for number, (name, arguments) in enumerate(RIGHT):
            request = {"jsonrpc": "2.0", "id": number, "method": "tools/call"}
            answers.append(bridge.handle_request({**request, "params": {"name": name, "arguments": arguments}}))
        return HarnessRolloutResult(done=answers[-1]["result"]["done"])

    session = factory.create("weekly-sales")
    assert CLIHarnessAdapter(drive).run_black_box(session).done
    assert session.verify([]).env_reward == 1.0
    session.close()


def called(call: Call, session: PoolSession) -> Any:
    """A call of this session."""
    return session.call_tool(*call)


def verified_session(session: PoolSession) -> Any:
    """Its result."""
    return session.verify([])


def in_a_child(pickled: bytes, answers: Any) -> None:
    """What a spawned rollout worker does with the factory it was given."""
    factory: PoolSessionFactory = pickle.loads(pickled)
    with factory:
        session = factory.create([{"role": "user", "content": "weekly-sales"}], seed=0, episode_id="0" * 32)
        rollout = MCPHarnessAdapter().run_white_box(ScriptedModel(*RIGHT), session)
        reward = session.verify(rollout.messages).env_reward
        session.close()
        answers.put((reward, session.episode.episode_id, factory.counts.scored))


def test_a_factory_travels_into_a_spawned_child_and_connects_there(field: Field) -> None:
    factory = PoolSessionFactory(field.settings, [weekly_sales()], run_id="run-test")
    pickled = pickle.dumps(factory)
    assert field.settings.e2b_api_key is not None
    assert field.settings.e2b_api_key.get_secret_value().encode() not in pickled, "a trainer needs no sandbox key"
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=in_a_child, args=(pickled, answers))
    child.start()
    try:
        reward, episode_id, scored = answers.get(timeout=60)
    finally:
        child.join(30)
    assert (reward, scored, child.exitcode) == (1.0, 1, 0)
    field.check_ended(episode_id, Outcome.SOLVED, roles=("policy", "verifier"))
    assert factory.counts.scored == 0, "the counts are each process's own"


def test_making_and_pickling_a_factory_needs_no_redis() -> None:
    factory = PoolSessionFactory(farm_settings("redis://127.0.0.1:1/0"), [weekly_sales()], run_id="run-test")
    copy = pickle.loads(pickle.dumps(factory))
    assert (copy.run_id, copy.rows()) == (factory.run_id, factory.rows())
    with pytest.raises(RedisUnavailable, match="no Redis at"):
        copy.create("weekly-sales")


def test_sessions_are_live_at_once(field: Field, factory: PoolSessionFactory) -> None:
    wait_until(lambda: field.farm.limiter.capacity().free == 4, description="both workers are ready")
    sessions = [factory.create("weekly-sales", seed=0) for _ in range(4)]  # four slots: none ends before all began
    with ThreadPoolExecutor(4) as threads:
        seen = list(threads.map(functools.partial(called, run("echo here")), sessions))
        assert [result.data for result in seen] == ["here\n"] * 4
        running = [field.running(session.episode.episode_id) for session in sessions]
        assert [len(rows) for rows in running] == [1] * 4
        for call in RIGHT:
            list(threads.map(functools.partial(called, call), sessions))
        assert [verified.env_reward for verified in threads.map(verified_session, sessions)] == [1.0] * 4
        list(threads.map(PoolSession.close, sessions))
    for session in sessions:
        field.check_ended(session.episode.episode_id, Outcome.SOLVED, roles=("policy", "verifier"))


def test_a_session_whose_sandbox_dies_has_no_score_and_is_no_zero(
    field: Field, factory: PoolSessionFactory, tmp_path: Path
) -> None:
    session = factory.create("weekly-sales")
    assert session.call_tool(*run("echo here")).data == "here\n"
    field.provider.delete(field.policy_sandbox(session.episode.episode_id))
    with pytest.raises(InfrastructureLost) as first:
        session.call_tool(*run("echo gone"))
    swallowed: list[Callable[[], Any]] = [lambda: session.call_tool(*SUBMIT), lambda: session.verify([])]
    for again in swallowed:
        with pytest.raises(InfrastructureLost) as later:
            again()
        assert later.value is first.value
    session.close()
    field.check_ended(session.episode.episode_id, Outcome.SANDBOX_LOST)
    counts = factory.counts
    assert (counts.scored, counts.failed, counts.abandoned, counts.causes) == (0, 1, 0, {"sandbox_lost": 1})
    assert collected(factory, tmp_path, *RIGHT, episodes=1, tasks=["weekly-sales"]).avg_reward == 1.0


def test_too_many_failures_stop_the_collector_and_leave_nothing(field: Field, tmp_path: Path) -> None:
    broken = weekly_sales(id="broken", template=NO_TEMPLATE)
    limit = FailureLimit(rate=0.5, window=4, minimum=3)
    with PoolSessionFactory(field.settings, [weekly_sales(), broken], run_id="run-test", failures=limit) as factory:
        tasks = ["weekly-sales", "broken", "broken", "weekly-sales", "weekly-sales"]
        with pytest.raises(TooManyFailures) as stopped:
            collected(factory, tmp_path, *RIGHT, episodes=5, tasks=tasks)
        assert "2 of the last 3 sessions failed (67%, limit 50%)" in str(stopped.value)
        assert "most frequent cause: setup_failed, 2 times" in str(stopped.value)
        with pytest.raises(TooManyFailures):
            factory.create("weekly-sales")
        assert (factory.counts.scored, factory.counts.failed, factory.counts.open) == (1, 2, 0)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1, "what was collected before is kept"
    wait_until(lambda: field.farm.ledger.open_episodes() == [], description="the worker has ended each, too")
    assert field.provider.list({}) == []


def test_closing_ends_a_call_on_its_way_and_is_no_failure(field: Field, factory: PoolSessionFactory) -> None:
    session = factory.create("weekly-sales")
    session.call_tool(*run("true"))
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(session.call_tool, *run("sleep 60"))
        actions = Keys.mailbox(session.episode.episode_id, "taken")
        wait_until(lambda: field.farm.redis.hlen(actions) > 1, description="the worker carries it out")
        closer = threads.submit(session.close)
        session.close()
        closer.result(20)
        ended = call.exception(20)  # the command's own limit may come first: then its answer is that
        assert isinstance(ended, InfrastructureLost) if ended else call.result().metadata["timed_out"]
    field.check_ended(session.episode.episode_id, Outcome.CANCELLED)
    with pytest.raises(EpisodeClosed):
        session.call_tool(*run("ls"))
    counts = factory.counts
    assert (counts.scored, counts.failed, counts.abandoned, counts.open) == (0, 0, 1, 0)


def test_closing_the_factory_ends_what_its_sessions_left(field: Field) -> None:
    with PoolSessionFactory(field.settings, [weekly_sales()], run_id="run-test") as factory:
        sessions = [factory.create("weekly-sales") for _ in range(5)]  # four slots: the fifth is queued
        sessions[0].call_tool(*run("true"))
    assert (factory.counts.open, factory.counts.abandoned, factory.counts.failed) == (0, 5, 0)
    for session in sessions:
        field.wait_receipt(session.episode.episode_id)
        assert field.receipt(session.episode.episode_id).receipt.outcome is Outcome.CANCELLED
        session.close()  # as harnesses do, even now: it counts once
    assert field.provider.list({}) == []
    assert (factory.counts.open, factory.counts.abandoned, factory.counts.failed) == (0, 5, 0)


def test_a_harness_that_leaves_every_session_unfinished_is_stopped(field: Field) -> None:
    limit = FailureLimit(window=3, minimum=3)
    with PoolSessionFactory(field.settings, [weekly_sales()], failures=limit) as factory:
        for _ in range(3):
            factory.create("weekly-sales").close()
        with pytest.raises(TooManyFailures, match="3 sessions in a row were closed unfinished: the harness or model"):
            factory.create("weekly-sales")
    with PoolSessionFactory(field.settings, [weekly_sales()], failures=limit) as factory:
        for _ in range(4):
            factory.create("weekly-sales")
        factory.close()
        factory.create("weekly-sales")
        assert (factory.counts.open, factory.counts.abandoned) == (1, 4)


def test_without_a_worker_a_session_says_what_to_start(redis_url: str, redis: Redis) -> None:
    settings = farm_settings(redis_url)
    with PoolSessionFactory(settings, [weekly_sales()], run_id="run-test", worker_patience_seconds=0.2) as factory:
        session = factory.create("weekly-sales")
        with pytest.raises(CapacityError, match="start `rollout-farm worker`"):
            session.call_tool(*run("ls"))
        session.close()
        assert factory.counts.causes == {"no_worker": 1}
    assert redis.zcard(Keys.OPEN) == 0


def test_without_its_redis_a_session_still_closes(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", appendfsync="no") as server:
        factory = PoolSessionFactory(farm_settings(server.url), [weekly_sales()])
        session = factory.create("weekly-sales")
    session.close()
    assert (factory.counts.unclosed, factory.counts.open) == (1, 0)
    with pytest.raises(RedisUnavailable, match="no Redis at"):
        PoolSessionFactory(farm_settings(server.url), [weekly_sales()]).create("weekly-sales")
    factory.close()


def nested(depth: int) -> dict[str, Any]:
    """An object in an object in an object."""
    body: dict[str, Any] = {}
    for _ in range(depth):
        body = {"a": body}
    return body


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (None, "needs a task and got None"),
        ("monthly-sales", r"one of the factory's tasks \(weekly-sales\)"),
        ([{"role": "user", "content": "fix it"}], "got 'fix it'"),
        ("{not json", "the task is no JSON"),
        ({"id": "x"}, "prompt"),
        ('{"id": "x"}', "prompt"),
        ([], "needs a task"),
        ('{"a":' * 3000, "nested too deeply"),
        (nested(3000), "nested too deeply|prompt"),
        ([nested(3000)], "needs a task"),
        ([{"content": [nested(3000)]}], "needs a task"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, str) else None,
)
def test_what_is_no_task_is_refused_with_what_to_give(task: object, says: str) -> None:
    factory = PoolSessionFactory(farm_settings("redis://127.0.0.1:1/0"), [weekly_sales()])
    with pytest.raises(TaskError, match=says):
        factory.create(task)
    assert (factory.counts.causes, factory.counts.open) == ({"task": 1}, 0)


def test_tasks_of_one_id_are_refused() -> None:
    with pytest.raises(TaskError, match="the same id"):
        PoolSessionFactory(farm_settings("redis://127.0.0.1:1/0"), [weekly_sales(), weekly_sales()])


def test_a_task_travels_in_a_row_in_each_of_its_forms(field: Field) -> None:
    nobodys = field.settings.model_copy(update={"queue": "nobodys"})
    with PoolSessionFactory(nobodys, [weekly_sales()], run_id="run-test") as factory:
        check_each_form(field, factory)


def check_each_form(field: Field, factory: PoolSessionFactory) -> None:
    """Whatever a row has in its place, it is that task's episode."""
    data = weekly_sales(id="another").model_dump(mode="json")
    forms: list[Any] = [
        factory.rows()[0]["prompt"],
        data,
        json.dumps(data),
        [{"role": "user", "content": json.dumps(data)}],
    ]
    ids = []
    for form in forms:
        session = factory.create(form)
        ids.append(session.episode.spec.task.id)
        session.close()  # in the queue: it ends here and now
        field.check_ended(session.episode.episode_id, Outcome.CANCELLED, roles=())
    assert ids == ["weekly-sales", "another", "another", "another"]


@pytest.mark.parametrize("changes", [{"run_id": "Bad Run"}, {"run_id": ""}, {"worker_patience_seconds": "x"}])
def test_a_factory_that_cannot_be_is_refused_when_it_is_made(redis_url: str, changes: dict[str, Any]) -> None:
    with pytest.raises(FarmError, match="got"):
        PoolSessionFactory(farm_settings(redis_url), **changes)
