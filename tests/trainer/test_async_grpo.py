"""AsyncGRPOTrainer on the farm's sessions, on CPU: TRL's own trainer, worker, child process and harness loop."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tasks import Task, parse_task
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import farm_settings
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.redis_server import announced
from tests.support.waiting import wait_until
from trainer.session_failures import FailureLimit
from trainer.sessions import PoolSessionFactory

pytest.importorskip("trl", reason="needs the train extra")

from datasets import Dataset
from transformers import TrainerCallback
from trl.trainer.utils import is_async_callable

from tests.support.cpu_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    CpuRolloutWorker,
    NoModelWorker,
    WeightFile,
    call_token,
    tiny_policy,
    without_gpu,
)
from trainer.async_grpo import FarmRolloutWorker, _only_scored

pytest_plugins = ["tests.support.farm"]
pytestmark = [
    pytest.mark.timeout(240),  # the child imports torch, transformers and TRL
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ANSWER = "/home/user/answer"
CALLS = [
    call_token("terminal", command=f"echo 7 > {ANSWER}"),
    call_token("terminal", command=f"echo 8 > {ANSWER}"),
    call_token("submit"),
]


def seven(**changes: Any) -> Task:
    """A task that a policy of three words can solve, fail and leave."""
    raw = {
        "id": "seven",
        "prompt": "Write 7 into the answer.",
        "files": {},
        "artifact": ANSWER,
        "command": f"cat {ANSWER}",
        "verification": {},
        "grader": "exact_stdout",
        "expected": "7\n",
    }
    return parse_task({**raw, **changes})


class Logs(TrainerCallback):  # type: ignore[misc]
    """What the trainer logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        self.rows.append(dict(logs or {}))


def made_trainer(
    field: Field,
    directory: Path,
    task: Task,
    *,
    steps: int,
    failures: FailureLimit | None = None,
    worker_class: type[CpuRolloutWorker] = CpuRolloutWorker,
) -> tuple[Any, Logs]:
    """TRL's trainer over the farm: groups of four, four sessions at once."""
    tokenizer, model = tiny_policy(CALLS, directory / "model", seed=1)
    weights = WeightFile(directory / "weights.pt")
    factory = PoolSessionFactory(field.settings, [task], run_id="run-async", failures=failures)
    rows = Dataset.from_list(factory.rows())
    worker = worker_class(
        factory,
        directory=directory / "model",
        weights=directory / "weights.pt",
        model_name="tiny",
        dataset=rows,
        processing_class=tokenizer,
        eos_token_ids=model.generation_config.eos_token_id,
        num_generations=4,
        max_inflight_tasks=4,
        max_tokens=1,
        max_tool_calling_iterations=4,
        queue_maxsize=8,
    )
    config = AsyncGRPOConfig(
        output_dir=str(directory / "out"),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=4,
        learning_rate=5e-3,
        max_completion_length=1,
        token_budget=-1,
        use_cpu=True,
        bf16=False,
        dtype="float32",
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        weight_sync_steps=1,
        max_staleness=8,
        gradient_checkpointing=False,
        max_tool_calling_iterations=4,
    )
    logs = Logs()
    trainer = AsyncGRPOTrainer(
        model=str(directory / "model"),
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=weights,
        callbacks=[logs],
    )
    return trainer, logs


def check_nothing_left(field: Field) -> list[str]:
    """Every episode of the run has its receipt and no sandbox; their ids."""
    assert field.farm.ledger.open_episodes() == []
    assert field.provider.list({}) == []
    return announced(field.farm.redis, "run-async")


def test_async_grpo_trains_on_the_farm(ground: Ground, tmp_path: Path) -> None:
    with open_field(ground) as field, without_gpu(spawned=True):
        field.worker("w1")
        field.worker("w2")
        trainer, logs = made_trainer(field, tmp_path, seven(), steps=3)
        trainer.train()
        receipts = [field.receipt(episode).receipt for episode in check_nothing_left(field)]
    rewards = [row["reward"] for row in logs.rows if "reward" in row]
    assert len(rewards) == 3
    assert all(0 <= reward <= 1 for reward in rewards)
    scored = [receipt for receipt in receipts if receipt.outcome.scored]
    assert len(scored) >= 12, "three steps of four"
    assert {receipt.outcome for receipt in receipts} - {receipt.outcome for receipt in scored} <= {Outcome.CANCELLED}
    assert {receipt.group_id for receipt in receipts} >= {"group-0", "group-1", "group-2"}
    assert trainer.weight_transfer.sent >= 3


def test_a_killed_child_is_an_error_at_once_and_its_episodes_end(ground: Ground, tmp_path: Path) -> None:
    class Kill(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer.rollout_worker._process.kill()

    with open_field(ground, trainer_lost_seconds=10.0) as field, without_gpu():
        field.worker("w1")
        trainer, _ = made_trainer(field, tmp_path, seven(), steps=100)
        trainer.add_callback(Kill())
        with pytest.raises(RuntimeError, match=r"has ended with -9"):
            trainer.train()
        field.reconcile()  # one that was opened and not yet queued is nobody else's
        wait_until(lambda: not field.farm.ledger.open_episodes(), seconds=60, description="its episodes have ended")
        check_nothing_left(field)


def test_async_grpo_stops_when_too_many_sessions_fail(ground: Ground, tmp_path: Path) -> None:
    with open_field(ground) as field, without_gpu():
        field.worker("w1")
        limit = FailureLimit(rate=0.5, window=8, minimum=4)
        trainer, logs = made_trainer(field, tmp_path, seven(template="no-such-template"), steps=3, failures=limit)
        with pytest.raises(RuntimeError, match="child has failed") as stopped:
            trainer.train()
        check_nothing_left(field)
    cause = str(stopped.value.__cause__)
    assert "TooManyFailures: 4 of the last 4 sessions failed (100%, limit 50%)" in cause
    assert "most frequent cause: setup_failed, 4 times" in cause
    assert not [row for row in logs.rows if "reward" in row]


def test_async_grpo_stops_when_its_model_server_refuses_every_request(ground: Ground, tmp_path: Path) -> None:
    with open_field(ground) as field, without_gpu():
        field.worker("w1")
        limit = FailureLimit(window=4, minimum=4)
        trainer, _ = made_trainer(field, tmp_path, seven(), steps=3, failures=limit, worker_class=NoModelWorker)
        with pytest.raises(RuntimeError, match="child has failed") as stopped:
            trainer.train()
        check_nothing_left(field)
    assert "sessions in a row were closed unfinished: the harness or model server fails" in str(stopped.value.__cause__)


def test_an_answer_may_be_as_long_as_a_tool_call_needs(redis_url: str) -> None:
    """TRL's loop alone takes 32 tokens a turn; what the caller says counts."""
    factory = PoolSessionFactory(farm_settings(redis_url))
    with without_gpu():
        default, told = FarmRolloutWorker(factory), FarmRolloutWorker(factory, max_tokens=64, request_timeout=30)
    assert given(default) == (512, 600)
    assert given(told) == (64, 30)


def given(worker: Any) -> tuple[int, int]:
    """What the child's loop is made with."""
    return worker._loop_kwargs["max_tokens"], worker._loop_kwargs["request_timeout"]


def style(*, completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.5] * len(completion_ids)


async def style_later(*, completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.5] * len(completion_ids)


def test_other_reward_functions_say_nothing_of_a_session_without_a_score() -> None:
    """TRL gives it an empty completion, and leaves it out only when all of its rewards are None."""
    rows: dict[str, Any] = {"completion_ids": [[1], [], [2]], "completions": ["a", "", "b"]}
    for_child = pickle.loads(pickle.dumps(_only_scored(style)))
    assert for_child(**rows) == [0.5, None, 0.5]
    assert for_child.__name__ == "style"
    assert asyncio.run(_only_scored(style_later)(**rows)) == [0.5, None, 0.5]
    assert is_async_callable(_only_scored(style_later))
    assert not is_async_callable(_only_scored(style))
