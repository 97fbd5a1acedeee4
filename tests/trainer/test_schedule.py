"""The learning rate after a resume, against that of a run that was never interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from trainer.schedule import continue_from


def begun(*, steps: int, rate: float) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    return optimizer, get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)


def rates(optimizer: Any, scheduler: Any, count: int) -> list[float]:
    """Of so many steps."""
    used = []
    for _ in range(count):
        used.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == [used[-1]], "what is logged is what is used"
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("earlier_rate", [8.0, 2.0])
def test_a_resumed_run_goes_on_with_its_own_rate_and_number_of_steps(earlier_rate: float) -> None:
    first = begun(steps=2, rate=earlier_rate)
    rates(*first, 2)
    assert first[0].param_groups[0]["lr"] == 0.0, "a linear schedule ends at nothing"
    again = begun(steps=4, rate=8.0)
    for made, loaded in zip(first, again, strict=True):
        loaded.load_state_dict(made.state_dict())
    continue_from(again[1], 8.0)
    assert rates(*again, 2) == rates(*begun(steps=4, rate=8.0), 4)[2:] == [4.0, 2.0]
