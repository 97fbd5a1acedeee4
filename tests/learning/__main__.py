"""`make learn`: several seeds and a control on a farm of its own; a plot, the curves as JSON, and an exit code.

    python -m tests.learning [--seeds 0 1 2] [--steps 80] [--output .]

Writes learn.png and learn.json below the output directory. Fails when a seed has not learnt, or when the control, whose
observations are swapped at random, seems to have.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")

from deploy.local_farm import LocalFarm
from orchestrator.pool import Pool
from orchestrator.settings import Settings
from tests.learning.plot import save_plot
from tests.learning.training import EPISODES, LEARNT, STEPS, UNLEARNT, Run, train

_CONTROL_STEPS = 25
"""At least; and no fewer than the slowest seed took."""


def main() -> int:
    """Run it all; 0 when every claim holds."""
    parser = argparse.ArgumentParser(prog="make learn", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS, help="at most, for each seed")
    parser.add_argument("--output", type=Path, default=Path())
    arguments = parser.parse_args()
    settings = Settings(_env_file=None)  # type: ignore[call-arg]
    own = {"redis_url": None, "e2b_api_key": None, "e2b_api_url": None, "template": "base"}
    with LocalFarm(settings.model_copy(update=own), workers=EPISODES // 2, temporary=True) as farm:
        with Pool(farm.settings) as pool:
            runs = [_shown(pool, seed, steps=arguments.steps, swapped=False) for seed in arguments.seeds]
            longest = max(len(run.rewards) for run in runs)
            runs.append(_shown(pool, arguments.seeds[0], steps=max(_CONTROL_STEPS, longest), swapped=True))
    save_plot(runs, arguments.output / "learn.png")
    (arguments.output / "learn.json").write_text(json.dumps([_as_json(run) for run in runs], indent=2) + "\n")
    failed = problems(runs)
    for line in failed or ["every seed has learnt and the control has not; see learn.png"]:
        print(line)
    return 1 if failed else 0


def problems(runs: Sequence[Run]) -> list[str]:
    """What the runs do not show."""
    found = [
        f"seed {run.seed} has not learnt: {run.last:.2f} in the last steps, not above {LEARNT}"
        for run in runs
        if not run.swapped and not run.learnt
    ]
    return found + [
        f"the control reached {run.best:.2f}, not below {UNLEARNT}: something else than the observations tells the bug"
        for run in runs
        if run.swapped and run.best >= UNLEARNT
    ]


def _shown(pool: Pool, seed: int, *, steps: int, swapped: bool) -> Run:
    name = f"control {seed}" if swapped else f"seed {seed}"
    began, count = time.monotonic(), 0

    def on_step(reward: float) -> None:
        nonlocal count
        count += 1
        print(f"{name}: step {count:3} reward {reward:.2f} {'#' * round(reward * 40)}", file=sys.stderr, flush=True)

    run = train(pool, seed, swapped=swapped, steps=steps, on_step=on_step)
    seconds = time.monotonic() - began
    print(f"{name}: {run.last:.2f} in the last steps, {len(run.rewards)} steps, {seconds:.0f} s", flush=True)
    return run


def _as_json(run: Run) -> dict[str, object]:
    return {"seed": run.seed, "swapped": run.swapped, "last": run.last, "best": run.best, "rewards": run.rewards}


if __name__ == "__main__":
    sys.exit(main())
