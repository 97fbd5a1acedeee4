"""What each of two processes runs in a test: a batch that cannot fit the farm, one that can, and one with a loss.

The last is a group of both processes' episodes, the second of the second process loses its sandbox and is excluded.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from deploy.training_report import NoBars
from orchestrator.errors import CapacityError, FarmError
from orchestrator.pool import Pool
from orchestrator.settings import Settings, load_settings
from orchestrator.tasks import load_builtin
from tests.support.policies import candidate, repaired
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
from trainer import FarmGRPOTrainer
from trainer.processes import the_first_does
from trainer.training import TrainingPlan, train
from workers.sandboxes.provider import E2BProvider

WRONG: list[Turn] = [[SUBMIT], []]
RIGHT: list[Turn] = [[shell(candidate(repaired()))], [SUBMIT], []]
SCRIPTS = {"0": [RIGHT, WRONG], "1": [WRONG, LOSE]}
"""Of each process, by its rank."""
LOSING_RUN = "run-of-two-that-loses"


def main(model: str, output: str) -> None:
    """Write how the first was refused, the ids of the second's episodes, what came of the third: one line of JSON."""
    settings = load_settings()
    fits = TrainingPlan(model=model, tasks=[load_builtin("weekly-sales")], cpu=True, output_dir=Path(output))
    try:
        train(replace(fits, batch_size=4), settings, NoBars())
    except CapacityError as error:
        refused = str(error)
    result = train(fits, settings, NoBars())
    names = [settled.receipt.episode_id for settled in result.receipts]
    found = lost(settings, Path(output) / "lost")
    said = {"refused": refused, "episodes": names, "steps": result.steps, "lost": found, "failed": failed()}
    sys.stdout.write(json.dumps(said) + "\n")


def failed() -> str:
    """What this process is told of an error of the first that nobody raises on purpose."""
    try:
        the_first_does(lambda: 1 // 0)
    except (ZeroDivisionError, FarmError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def lost(settings: Settings, directory: Path) -> dict[str, Any]:
    """What came of the batch: `masked` of this process's rows, its weights; all else of both processes' rows."""
    assert settings.e2b_api_key is not None
    provider = E2BProvider(settings.e2b_api_key.get_secret_value(), api_url=settings.e2b_api_url)

    def delete(episode_id: str) -> None:
        for row in provider.list({"episode": episode_id}):
            provider.delete(row.sandbox_id)

    scripts = SCRIPTS[os.environ["RANK"]]
    tokenizer = make_tokenizer([*script_words([turns for both in SCRIPTS.values() for turns in both]), "fix"])
    with (
        Pool(settings, run_id=LOSING_RUN) as pool,
        LosingEpisodes(pool, delete, on_abort="exclude") as episodes,
    ):
        trainer = scripted(FarmGRPOTrainer, scripts)(
            model=make_model(tokenizer),
            args=grpo_config(directory, batch=2, group=4),
            train_dataset=rows(load_builtin("weekly-sales")),
            processing_class=tokenizer,
            environment_factory=episodes,
        )
        trainer.remove_callback(PrinterCallback)  # it prints to standard output
        before = weights(trainer)
        trainer.train()
        groups = {row.spec.group_id for name in pool.submitted if (row := pool.ledger.row(name)) is not None}
    rewards = trainer._logs["rewards"]["RemoteEpisode"]
    return {
        "groups": sorted(map(str, groups)),
        "masked": [set(mask) == {0} for mask in trainer.generated[2]],
        "rewards": [None if math.isnan(reward) else reward for reward in rewards],
        "advantages": [float(advantage) for advantage in trainer._logs["advantages"]],
        "counts": {name: n for name, n in trainer.state.log_history[0].items() if name.startswith("episodes/")},
        "moved": not torch.equal(before, weights(trainer)),
        "weights": weights(trainer).sum().item(),
    }


def weights(trainer: Any) -> torch.Tensor:
    """All of them in one row."""
    return torch.cat([weight.detach().flatten().clone() for weight in trainer.model.parameters()])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
