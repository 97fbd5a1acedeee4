"""What aborted episodes leave of a batch."""

from __future__ import annotations

import pytest

from orchestrator.vocabulary import Outcome
from trainer.groups import judge

LOST = Outcome.SANDBOX_LOST


def judged(rewards: list[float | None], group_size: int, **options: int) -> list[bool]:
    outcomes = [LOST if reward is None else None for reward in rewards]
    return list(judge(rewards, outcomes, group_size=group_size, **options).excluded)


@pytest.mark.parametrize(
    ("rewards", "excluded"),
    [
        ([0.0, 1.0, 0.0, 1.0], [False] * 4),
        ([0.0, None, 1.0, 1.0], [False, True, False, False]),
        ([0.0, None, None, 1.0], [False, True, True, False]),
        ([None, None, None, 1.0], [True] * 4),
        ([None] * 4, [True] * 4),
        ([None, 1.0, 0.0, 0.0, None, None, 1.0, None], [True, False, False, False] + [True] * 4),
    ],
)
def test_a_group_is_kept_while_two_members_survive(rewards: list[float | None], excluded: list[bool]) -> None:
    assert judged(rewards, 4) == excluded


def test_an_evaluation_keeps_every_score() -> None:
    assert judged([None, 1.0, 0.0, None], 2, survivors=1) == [True, False, False, True]
    assert judged([1.0, 0.0], 1, survivors=1) == [False, False]


def test_counts_say_what_was_left_out_and_why() -> None:
    counts = judge(
        [0.0, 0.0, None, 1.0, 1.0, None],
        [None, None, LOST, None, None, Outcome.WORKER_LOST],
        group_size=2,
    ).counts
    assert counts == {
        "episodes/finished": 6,
        "episodes/aborted": 2,
        "episodes/excluded": 4,
        "groups/finished": 3,
        "groups/dropped": 2,
        "groups/identical_rewards": 1,
        "episodes/aborted/sandbox_lost": 1,
        "episodes/aborted/worker_lost": 1,
    }
