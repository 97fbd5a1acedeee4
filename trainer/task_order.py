"""The order in which a resumed run takes its tasks: that of a run that was never interrupted.

What always holds: each epoch has the permutation that the seed gives it, whichever epoch a run is resumed in. TRL's
sampler draws one an epoch and Transformers begins at the first again: from the second epoch on a resumed run would take
some tasks twice and others never.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class TaskOrder(TrainerCallback):  # type: ignore[misc, unused-ignore] # transformers is not checked
    """Draws what the epochs before a resume have drawn."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any = None, **_: Any) -> None:
        """The state is loaded, and no task has been taken."""
        sampler = _sampler_of(train_dataloader)
        if not state.global_step or getattr(sampler, "generator", None) is None:
            return  # a stream of tasks is told its epoch by Transformers
        steps_in_epoch = -(-len(train_dataloader) // args.gradient_accumulation_steps) or 1
        for _epoch in range(state.global_step // steps_in_epoch):
            next(iter(sampler), None)


def _sampler_of(loader: Any) -> Any:
    """What is below the layers that share out its batches among processes."""
    found: Any = getattr(loader, "batch_sampler", None)
    while hasattr(found, "batch_sampler"):
        found = found.batch_sampler
    return getattr(found, "sampler", None)
