"""Training steps on real episodes: what reaches the optimizer, what an aborted episode does, what is left behind."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from orchestrator.errors import CapacityError, EpisodeAborted, FarmError
from orchestrator.pool import Pool
from orchestrator.tasks import TaskError
from orchestrator.vocabulary import Outcome
from tests.support.farm import Field
from tests.support.policies import candidate, repaired, weekly_sales
from tests.support.redis_server import announced
from tests.support.tiny_policy import (
    SUBMIT,
    Turn,
    grpo_config,
    make_model,
    make_tokenizer,
    rows,
    script_words,
    scripted,
    shell,
)
from tests.trainer.losing import LOSE, LosingEpisodes
from trainer import FarmGRPOTrainer, RemoteEpisodes

RUN = shell("python3 -B /home/user/report.py")
REPAIR = shell(candidate(repaired()))
SOLVE: list[Turn] = [[RUN], [REPAIR], [SUBMIT], []]
SUBMIT_BUG: list[Turn] = [[RUN], [SUBMIT], []]
LOOK: list[Turn] = [[RUN], []]

CONFIG = ("group", "loss_type", "max_steps", "eval_strategy", "eval_steps")
"""What is GRPOConfig's; other options are the trainer's."""


def trainer_of(
    episodes: RemoteEpisodes, directory: Path, scripts: list[list[Turn]], *, dataset: Any = None, **options: Any
) -> Any:
    tokenizer = make_tokenizer([*script_words(scripts), "fix"])
    members = options.pop("members", {})
    config = {name: options.pop(name) for name in CONFIG if name in options}
    return scripted(FarmGRPOTrainer, scripts, **members)(
        model=make_model(tokenizer),
        args=grpo_config(directory, batch=len(scripts), **config),
        train_dataset=rows(weekly_sales()) if dataset is None else dataset,
        processing_class=tokenizer,
        environment_factory=episodes,
        **options,
    )


def weights(trainer: Any) -> Any:
    return torch.cat([weight.detach().flatten().clone() for weight in trainer.model.parameters()])


def outcomes(pool: Pool) -> list[Outcome]:
    """In the order of submission."""
    found = [pool.ledger.receipt(name) for name in pool.submitted]
    return [settled.receipt.outcome for settled in found if settled is not None]


def losing(farm: Field, pool: Pool, **options: Any) -> LosingEpisodes:
    return LosingEpisodes(pool, lambda name: farm.provider.delete(farm.policy_sandbox(name)), **options)


def test_a_step_trains_on_real_episodes_of_one_batch(pool: Pool, episodes: RemoteEpisodes, tmp_path: Path) -> None:
    trainer = trainer_of(episodes, tmp_path, [SOLVE, SUBMIT_BUG, LOOK, SOLVE])
    before = weights(trainer)
    trainer.train()
    assert outcomes(pool) == [Outcome.SOLVED, Outcome.WRONG_ANSWER, Outcome.NOT_SUBMITTED, Outcome.SOLVED]
    assert list(trainer._logs["rewards"]["RemoteEpisode"]) == [1.0, 0.0, 0.0, 1.0]
    assert not torch.equal(before, weights(trainer))
    first = trainer.state.log_history[0]
    assert first["reward"] == 0.5
    assert (first["episodes/finished"], first["episodes/aborted"], first["groups/identical_rewards"]) == (4, 0, 0)
    specs = [pool.ledger.row(name).spec for name in pool.submitted]  # type: ignore[union-attr]
    assert len({spec.reservation_id for spec in specs} - {None}) == 1
    assert {spec.group_id for spec in specs} == {f"{pool.run_id}-b0-g0"}


def test_a_group_with_identical_rewards_is_counted_and_moves_nothing(episodes: RemoteEpisodes, tmp_path: Path) -> None:
    trainer = trainer_of(
        episodes, tmp_path, [LOOK, LOOK, SOLVE, LOOK], dataset=rows(weekly_sales(), weekly_sales()), group=2
    )
    trainer.train()
    first = trainer.state.log_history[0]
    assert (first["groups/finished"], first["groups/identical_rewards"], first["frac_reward_zero_std"]) == (2, 1, 0.5)


def test_a_reset_observation_reaches_the_prompt(episodes: RemoteEpisodes, tmp_path: Path) -> None:
    task = weekly_sales(prompt="fix fix fix")
    bare = Dataset.from_list([{"task": task.model_dump_json()}])
    trainer = trainer_of(episodes, tmp_path, [LOOK, SUBMIT_BUG], dataset=bare)
    trainer.train()
    said = trainer._tokenizer.decode(trainer.generated[0][0])
    assert "fix fix fix" in said


@pytest.mark.parametrize("prompt", ["fix", "", [], ["fix"], None], ids=repr)
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset['held out']"])
def test_a_prompt_that_is_no_chat_is_refused_before_a_batch(
    episodes: RemoteEpisodes, pool: Pool, tmp_path: Path, prompt: Any, name: str
) -> None:
    plain = Dataset.from_list([{"prompt": prompt, "task": weekly_sales().model_dump_json()}])
    given = {"dataset": plain} if name == "train_dataset" else {"eval_dataset": {"held out": plain}}
    with pytest.raises(FarmError, match=r"the prompt of row 0 is no chat .*\[\{\"role\": \"user\"") as refused:
        trainer_of(episodes, tmp_path, [LOOK, LOOK], **given)
    assert str(refused.value).startswith(name)
    assert pool.submitted == []


# aborted episodes


def test_by_default_an_aborted_episode_ends_the_run(farm: Field, pool: Pool, tmp_path: Path) -> None:
    with losing(farm, pool) as episodes:
        trainer = trainer_of(episodes, tmp_path, [SOLVE, LOSE, LOOK, LOOK])
        before = weights(trainer)
        with pytest.raises(EpisodeAborted, match="exclude") as raised:
            trainer.train()
        assert raised.value.outcome is Outcome.SANDBOX_LOST
        assert torch.equal(before, weights(trainer))
    assert sorted(outcomes(pool)) == sorted(
        [Outcome.SOLVED, Outcome.SANDBOX_LOST, Outcome.NOT_SUBMITTED, Outcome.NOT_SUBMITTED]
    )


def test_one_failed_rollout_neither_ends_the_run_nor_becomes_a_zero(
    farm: Field, pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with losing(farm, pool, on_abort="exclude") as episodes:
        trainer = trainer_of(episodes, tmp_path, [SOLVE, LOSE, SUBMIT_BUG, SOLVE])
        trainer.train()
    first = trainer.state.log_history[0]
    assert first["reward"] == pytest.approx(2 / 3)
    rewards = list(trainer._logs["rewards"]["RemoteEpisode"])
    assert rewards[0] == rewards[3] == 1.0
    assert math.isnan(rewards[1])
    assert trainer._logs["advantages"][1] == 0.0
    assert trainer._logs["advantages"][0] == pytest.approx(1 / math.sqrt(3), rel=1e-3), "of three, not of four"
    assert set(trainer.generated[2][1]) == {0}, "no token of it is trained on"
    assert 1 in trainer.generated[2][0]
    assert (first["episodes/aborted"], first["episodes/aborted/sandbox_lost"], first["episodes/excluded"]) == (1, 1, 1)
    assert math.isfinite(first["loss"])
    assert "verification" not in caplog.text, "TRL's warning shows the whole task, what is held out included"


def halves(completions: list[Any], **_: Any) -> list[float]:
    return [0.5] * len(completions)


async def halves_later(completions: list[Any], **_: Any) -> list[float]:
    return halves(completions)


def test_other_reward_functions_do_not_make_a_zero_of_an_aborted_episode(
    farm: Field, pool: Pool, tmp_path: Path
) -> None:
    with losing(farm, pool, on_abort="exclude") as episodes:
        scripts = [SOLVE, LOSE, SUBMIT_BUG, SOLVE]
        trainer = trainer_of(episodes, tmp_path, scripts, reward_funcs=[halves, functools.partial(halves_later)])
        trainer.train()
    logs = trainer._logs
    for name, value in (("RemoteEpisode", 1.0), ("halves", 0.5), ("halves_later", 0.5)):
        assert logs["rewards"][name][0] == value
        assert math.isnan(logs["rewards"][name][1])
    third = 1 / math.sqrt(3)
    assert list(logs["advantages"]) == pytest.approx([third, 0.0, -2 * third, third], rel=1e-3), "of three, not of four"
    assert trainer.state.log_history[0]["reward"] == pytest.approx(2 / 3 + 1)


def test_a_reward_model_is_refused_where_aborted_episodes_are_excluded(pool: Pool, tmp_path: Path) -> None:
    with RemoteEpisodes(pool, on_abort="exclude") as episodes, pytest.raises(FarmError, match="reward model"):
        trainer_of(episodes, tmp_path, [LOOK] * 2, reward_funcs="some/reward-model")


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_batch_without_any_group_left_moves_nothing(farm: Field, pool: Pool, tmp_path: Path, loss_type: str) -> None:
    with losing(farm, pool, on_abort="exclude") as episodes:
        trainer = trainer_of(episodes, tmp_path, [SOLVE, LOSE], loss_type=loss_type)
        before = weights(trainer)
        trainer.train()
    first = trainer.state.log_history[0]
    assert torch.equal(before, weights(trainer))
    assert first["loss"] == 0.0
    assert first["reward"] is None
    assert (first["episodes/excluded"], first["groups/dropped"]) == (2, 1)


def test_batches_in_a_row_without_a_score_end_the_run(farm: Field, pool: Pool, tmp_path: Path) -> None:
    with losing(farm, pool, on_abort="exclude") as episodes:
        trainer = trainer_of(episodes, tmp_path, [LOSE, LOSE], max_steps=10)
        with pytest.raises(EpisodeAborted, match="3 batches in a row"):
            trainer.train()
    assert len(announced(pool.redis, pool.run_id)) == 6


# refusals and endings


def test_a_batch_that_can_never_be_live_is_refused_before_it_starts(
    pool: Pool, episodes: RemoteEpisodes, tmp_path: Path
) -> None:
    trainer = trainer_of(episodes, tmp_path, [LOOK] * 6)
    with pytest.raises(CapacityError, match="add 1 worker"):
        trainer.train()
    assert pool.submitted == []


def test_an_evaluation_that_can_never_be_live_is_refused_before_the_first_step(
    pool: Pool, episodes: RemoteEpisodes, tmp_path: Path
) -> None:
    asked = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(*[weekly_sales()] * 3)}
    trainer = trainer_of(episodes, tmp_path, [LOOK] * 2, **asked)
    with pytest.raises(CapacityError, match="a batch of 6 can never be live"):
        trainer.train()
    assert pool.submitted == []


def test_an_evaluation_smaller_than_its_batch_is_what_it_is(
    pool: Pool, episodes: RemoteEpisodes, tmp_path: Path
) -> None:
    asked = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(*[weekly_sales()] * 2)}
    trainer = trainer_of(episodes, tmp_path, [SOLVE, LOOK], **asked)
    trainer.train()
    assert len(announced(pool.redis, pool.run_id)) == 2 + 4, "eight fit no farm of four slots; there are four"
    assert any(row.get("eval_reward") == 0.5 for row in trainer.state.log_history)


def test_a_task_column_that_is_not_json_is_refused(pool: Pool, episodes: RemoteEpisodes, tmp_path: Path) -> None:
    wrong = Dataset.from_list([{"prompt": [{"role": "user", "content": "fix"}], "task": "weekly-sales"}])
    with pytest.raises(TaskError, match=r"json\.dumps"):
        trainer_of(episodes, tmp_path, [LOOK] * 2, dataset=wrong).train()
    assert pool.submitted == []


def test_a_template_without_tools_is_refused(episodes: RemoteEpisodes, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["fix"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="tool calling"):
        FarmGRPOTrainer(
            model=make_model(tokenizer),
            args=grpo_config(tmp_path, batch=2),
            train_dataset=rows(weekly_sales()),
            processing_class=tokenizer,
            environment_factory=episodes,
        )


class Crash(Exception):
    """What a test breaks the run with."""


def test_environments_are_closed_after_a_crash_in_the_optimizer(pool: Pool, tmp_path: Path) -> None:
    def crash(*_: Any) -> None:
        forgotten.reset(task=weekly_sales().model_dump_json())
        forgotten.terminal("true")
        raise Crash

    episodes = RemoteEpisodes(pool)
    forgotten = episodes()
    trainer = trainer_of(episodes, tmp_path, [SOLVE, LOOK])
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.optimizer.register_step_pre_hook(crash)
    with pytest.raises(Crash):
        trainer.train()
    assert outcomes(pool) == [Outcome.SOLVED, Outcome.NOT_SUBMITTED, Outcome.CANCELLED]


def test_an_interrupted_generation_leaves_no_episode(pool: Pool, episodes: RemoteEpisodes, tmp_path: Path) -> None:
    turns = 0

    def interrupt(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal turns
        turns += 1
        if turns == 2:
            raise KeyboardInterrupt
        return sample(self, *args, **options)

    trainer = trainer_of(episodes, tmp_path, [SOLVE, LOOK])
    sample = type(trainer)._generate_single_turn
    type(trainer)._generate_single_turn = interrupt
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert outcomes(pool) == [Outcome.CANCELLED] * 2
