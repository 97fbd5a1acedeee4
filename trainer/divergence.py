"""The end of a run that diverged: its loss, gradient or weights are no numbers.

What always holds: such a step is in the metrics, and nothing of it is saved: Transformers logs a step before it saves.
Without this a model of NaN would be saved, and look like one that had nothing to learn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from orchestrator.errors import FarmError, SettingsError
from trainer.evaluation.pretrained import not_finite
from trainer.saved_states import saved_states, step_of


class Divergence(TrainerCallback):  # type: ignore[misc, unused-ignore] # transformers is not checked
    """Raises in all processes alike: what is logged is the mean of all."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """The weights are loaded, those of a resumed state too."""
        if (wrong := not_finite(model)) is not None:
            raise SettingsError(
                f"the weights of step {state.global_step} hold NaN or infinity ({wrong}): there is nothing to go on "
                "with; move that state away to --resume an earlier one with a smaller --learning-rate, or choose "
                "another --output-dir"
            )

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, *, model: Any = None, **_: Any
    ) -> None:
        """A step was made, or the run has ended."""
        found = {name: value for name, value in (logs or {}).items() if name in ("loss", "grad_norm")}
        wrong = [f"{name} {value}" for name, value in found.items() if not math.isfinite(value)]
        if found and not wrong and (weight := not_finite(model)) is not None:
            wrong = [f"{weight} holds NaN or infinity"]
        if wrong:
            raise FarmError(
                f"the run diverged in step {state.global_step} ({', '.join(wrong)}), which is not saved: {_next(args)}"
            )


def _next(args: Any) -> str:
    states = saved_states(Path(args.output_dir))
    way = "try a smaller --learning-rate"
    if not states:
        return f"{way} and another --output-dir"
    return f"{way}, and --resume goes on from step {step_of(states[-1])}"
