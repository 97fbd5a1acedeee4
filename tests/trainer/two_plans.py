"""What each of two processes runs in a test: a plan whose batch cannot fit the farm, then one that can."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from deploy.training_report import NoBars
from orchestrator.errors import CapacityError
from orchestrator.settings import load_settings
from orchestrator.tasks import load_builtin
from trainer.training import TrainingPlan, train


def main(model: str, output: str) -> None:
    """Write how the first was refused and the ids of the second's episodes, one line of JSON."""
    fits = TrainingPlan(model=model, tasks=[load_builtin("weekly-sales")], cpu=True, output_dir=Path(output))
    try:
        train(replace(fits, batch_size=4), load_settings(), NoBars())
    except CapacityError as error:
        refused = str(error)
    result = train(fits, load_settings(), NoBars())
    names = [settled.receipt.episode_id for settled in result.receipts]
    sys.stdout.write(json.dumps({"refused": refused, "episodes": names, "steps": result.steps}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
