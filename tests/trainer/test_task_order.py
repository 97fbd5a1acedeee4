"""Which tasks a resumed run takes, against those of a run that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from transformers import TrainerState

from orchestrator.pool import Pool
from tests.support.policies import weekly_sales
from tests.support.timed_pool import TimedPool
from tests.support.tiny_policy import SUBMIT, grpo_config, make_model, make_tokenizer, rows, scripted
from trainer import FarmGRPOTrainer, RemoteEpisodes
from trainer.task_order import TaskOrder

TASKS = [weekly_sales(id=f"t{number}") for number in range(4)]
EPOCH = len(TASKS)
"""Steps: one task is one group is one step."""


class Seen(TimedPool):
    """Keeps the ids of the tasks, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []

    def submit(self, task: Any, **options: Any) -> Any:
        self.ids.append(task.id)
        return super().submit(task, **options)


def trainer(directory: Path, pool: TimedPool, **changes: Any) -> Any:
    tokenizer = make_tokenizer([SUBMIT])
    return scripted(FarmGRPOTrainer, [[[SUBMIT], []]])(
        model=make_model(tokenizer),
        args=grpo_config(directory, batch=2, shuffle_dataset=True, **changes),
        train_dataset=rows(*TASKS),
        processing_class=tokenizer,
        environment_factory=RemoteEpisodes(cast(Pool, pool)),
    )


def test_a_resumed_run_takes_the_tasks_that_were_left(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 6}
    whole, resumed = Seen(), Seen()
    trainer(tmp_path, whole, max_steps=2 * EPOCH, **saving).train()
    trainer(tmp_path, resumed, max_steps=2 * EPOCH).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.ids[::2] == whole.ids[::2][6:]
    assert sorted(whole.ids[::2][EPOCH:6] + resumed.ids[::2]) == [task.id for task in TASKS]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_every_epoch_has_its_own_order_wherever_a_run_is_resumed(tmp_path: Path, accumulated: int) -> None:
    made = trainer(tmp_path, TimedPool(), gradient_accumulation_steps=accumulated)

    def taken(loader: Any) -> list[str]:
        return [row["task"] for batch in loader for row in batch]

    loader = made.get_train_dataloader()
    orders = [taken(loader) for _ in range(4)]
    assert orders[0] != orders[1] != orders[2], "a sampler that gave one order only would show nothing"
    for step in range(EPOCH * 4 // accumulated):
        loader = made.get_train_dataloader()
        state = TrainerState(global_step=step)
        TaskOrder().on_train_begin(made.args, state, None, train_dataloader=loader)
        assert taken(loader) == orders[step * accumulated // EPOCH]
