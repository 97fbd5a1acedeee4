"""The learning rate of a resumed run, and how often it saves.

What always holds: each step's rate comes from this run's own `--learning-rate` and `--max-steps`, whatever the state
that it goes on from had reached; a linear schedule that ended there had come down to 0. So does `--save-steps`.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class Schedule(TrainerCallback):  # type: ignore[misc, unused-ignore] # transformers is not checked
    """Sets the rate anew once a state is loaded: Transformers takes over that of the state."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, lr_scheduler: Any = None, **_: Any) -> None:
        """The optimizer and the scheduler are what they were, and no step has been made."""
        state.compute_steps(args, args.max_steps)
        if state.global_step and hasattr(lr_scheduler, "lr_lambdas"):
            continue_from(lr_scheduler, args.learning_rate)


def continue_from(scheduler: Any, learning_rate: float) -> None:
    """Let a LambdaLR give the rate that its own lambdas say for the step it has reached, from this highest rate."""
    groups = scheduler.optimizer.param_groups
    scheduler.base_lrs = [learning_rate] * len(groups)
    for group, share_at in zip(groups, scheduler.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = learning_rate, learning_rate * share_at(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in groups]  # what is logged
