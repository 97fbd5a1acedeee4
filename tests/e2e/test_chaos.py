"""A short round of chaos with a fixed seed; `make chaos` plays long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plant import Target
from tests.chaos.round import play


@pytest.mark.timeout(300)
def test_a_farm_that_is_killed_piece_by_piece_loses_and_leaks_nothing(tmp_path: Path) -> None:
    outcome = play(tmp_path, seed=20, episodes=24, workers=2, rest_seconds=(0.5, 2.0))
    assert outcome.violations == []
    assert sum(outcome.outcomes.values()) == 24
    assert outcome.outcomes["solved"] >= 3, "what is not hit goes on"
    assert set(outcome.blows) == set(Target)
