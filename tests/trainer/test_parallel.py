"""Parallel tool calls under GRPOTrainer: token by token what TRL's own loop makes, on scripts that try its corners."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from trl import GRPOTrainer

from orchestrator.errors import FarmError
from orchestrator.pool import Pool
from orchestrator.tasks import Task
from tests.bench.parallel_rollouts import measure
from tests.support.policies import weekly_sales
from tests.support.timed_pool import TimedEpisode, TimedPool, Times
from tests.support.tiny_policy import (
    SUBMIT,
    Turn,
    call,
    grpo_config,
    make_model,
    make_tokenizer,
    rows,
    script_words,
    scripted,
    shell,
)
from trainer import FarmGRPOTrainer, RemoteEpisodes
from trainer.grpo import seam_problem
from trainer.tool_calls import ToolCalls

LS, PWD, BOOM, NOPE = shell("ls"), shell("pwd -P"), shell("boom"), call("nope")
WRONG = call("terminal", x=1)
SCRIPTS: list[list[Turn]] = [
    [[LS], [PWD], [SUBMIT], []],
    [[]],
    [[LS, SUBMIT], []],
    [[NOPE], [LS], []],
    [[WRONG], [LS], []],
    [[BOOM], [SUBMIT], [LS], []],
    [[LS]] * 30,
    [[LS, WRONG, PWD, NOPE, LS], [NOPE, LS], []],
]


def trained(
    base: Any,
    directory: Path,
    *,
    scripts: list[list[Turn]] = SCRIPTS,
    pool: TimedPool | None = None,
    **changes: Any,
) -> tuple[Any, TimedPool]:
    """A trainer after one step on the scripts, and its pool."""
    tokenizer = make_tokenizer([*script_words(scripts), "ok1", "ok2", "ok3", "ok4", "bye"])
    pool = pool or TimedPool()
    trainer = scripted(base, scripts)(
        model=make_model(tokenizer),
        args=grpo_config(directory, batch=8, **changes),
        train_dataset=rows(weekly_sales()),
        processing_class=tokenizer,
        environment_factory=RemoteEpisodes(cast(Pool, pool), batch_size=8),
    )
    trainer.train()
    return trainer, pool


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_tool_calling_iterations": 1},
        {"max_tool_calling_iterations": 2},
        {"max_completion_length": 30},
        {"max_completion_length": 6},
    ],
)
def test_ids_masks_completions_rewards_and_commands_are_trls_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    serial, serial_pool = trained(GRPOTrainer, tmp_path / "serial", **changes)
    parallel, parallel_pool = trained(FarmGRPOTrainer, tmp_path / "parallel", **changes)
    for part in range(5):  # prompt ids, completion ids, tool mask, completions, logprobs
        assert parallel.generated[part] == serial.generated[part]
    assert [episode.log for episode in parallel_pool.episodes] == [episode.log for episode in serial_pool.episodes]
    assert list(parallel._logs["rewards"]["RemoteEpisode"]) == list(serial._logs["rewards"]["RemoteEpisode"])
    assert list(parallel._logs["advantages"]) == list(serial._logs["advantages"])
    ours, theirs = parallel.state.log_history[0], serial.state.log_history[0]
    same = {name for name in theirs if "time" not in name and "per_second" not in name}
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert 0 in parallel.generated[2][0] or changes.get("max_completion_length") == 6


@dataclass
class MeetingEpisode(TimedEpisode):
    """Goes on when as many are in the same call as the barrier waits for."""

    together: threading.Barrier = field(kw_only=True)

    def terminal(self, command: str) -> str:
        self.together.wait()
        return super().terminal(command)

    def submit(self) -> str:
        self.together.wait()
        return super().submit()

    def reward(self) -> float:
        self.together.wait()
        return super().reward()


class MeetingPool(TimedPool):
    """Its episodes do nothing alone."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.together = threading.Barrier(count, timeout=20)

    def submit(self, task: Task, **options: Any) -> TimedEpisode:
        plain = super().submit(task, **options)
        self.episodes[-1] = MeetingEpisode(plain.episode_id, plain.times, plain.ready_at, together=self.together)
        return self.episodes[-1]


def test_a_batchs_tool_calls_and_rewards_run_at_once_under_the_trainer(tmp_path: Path) -> None:
    scripts: list[list[Turn]] = [[[LS], [PWD], [SUBMIT], []]] * 8
    trainer, pool = trained(FarmGRPOTrainer, tmp_path, scripts=scripts, pool=MeetingPool(8))
    assert [episode.log for episode in pool.episodes] == [["ls", "pwd -P", "submit"]] * 8
    assert list(trainer._logs["rewards"]["RemoteEpisode"]) == pytest.approx([0.3] * 8)


def test_the_bench_finds_ids_masks_and_rewards_the_same() -> None:
    assert set(measure(episodes=2, times=Times())) == {"trl", "farm"}


def test_the_calls_of_a_round_run_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(4)
    completions: list[list[Any]] = [[] for _ in range(4)]

    def tool(command: str) -> str:
        together.wait(10)
        return command

    with ThreadPoolExecutor(4) as executor:
        tools = ToolCalls(completions, [{"terminal": tool}] * 4, executor).tools
        for number in range(3):
            for row, completion in enumerate(completions):
                wanted = {"name": "terminal", "arguments": {"command": f"{row}{number}"}}
                completion.append({"role": "assistant", "tool_calls": [{"type": "function", "function": wanted}]})
            asked = [by_name["terminal"](command=f"{row}{number}") for row, by_name in enumerate(tools)]
            assert asked == [f"{row}{number}" for row in range(4)]


def test_one_rows_calls_stay_in_order_and_errors_come_where_they_belong() -> None:
    made: list[str] = []

    def tool(command: str) -> str:
        made.append(command)
        if command == "b":
            raise RuntimeError("boom")
        return command.upper()

    calls = [{"type": "function", "function": {"name": "terminal", "arguments": {"command": c}}} for c in "abc"]
    with ThreadPoolExecutor(4) as executor:
        tools = ToolCalls([[{"role": "assistant", "tool_calls": calls}]], [{"terminal": tool}], executor).tools
        assert tools[0]["terminal"](command="a") == "A"
        with pytest.raises(RuntimeError, match="boom"):
            tools[0]["terminal"](command="b")
        with pytest.raises(TypeError):
            tools[0]["terminal"](wrong="b")
        assert tools[0]["terminal"](command="c") == "C"
    assert made == ["a", "b", "c"]


def test_the_private_seam_is_where_it_was() -> None:
    problem = seam_problem()
    assert problem is None, problem


def test_a_trl_that_has_moved_is_said_clearly() -> None:
    class Gone:
        pass

    class Renamed:
        def _tool_call_loop(self, prompts: Any, answers: Any) -> None:
            self._sync_tool_dicts: list[Any] = []

    class Elsewhere:
        def _tool_call_loop(self, prompts: Any, completions: Any) -> None:
            pass

    class Endless:
        def __init__(self) -> None:
            self.stops: list[int] = []

        def _tool_call_loop(self, prompts: Any, completions: Any) -> None:
            self._sync_tool_dicts: list[Any] = []

    found = ((Gone, "is gone"), (Renamed, "completions"), (Elsewhere, "_sync_tool_dicts"), (Endless, "eos_token_ids"))
    for base, word in found:
        problem = seam_problem(base)
        assert problem is not None
        assert word in problem
        assert "install trl>=1.16,<1.17" in problem


def test_a_factory_of_another_kind_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer([LS])
    with pytest.raises(FarmError, match="RemoteEpisodes"):
        FarmGRPOTrainer(
            model=make_model(tokenizer),
            args=grpo_config(tmp_path, batch=2),
            train_dataset=rows(weekly_sales()),
            processing_class=tokenizer,
            environment_factory=cast(RemoteEpisodes, dict),
        )
