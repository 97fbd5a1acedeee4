"""What aborted episodes leave of a batch: which completions are trained on, and the counts that say so.

Pure: nothing here talks to anybody. A reward is None exactly where an episode was aborted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.vocabulary import Outcome

SURVIVORS = 2
"""Fewer scored members give a group no difference to learn from."""


@dataclass(frozen=True)
class Judgement:
    """One generation batch over all processes, in row order."""

    excluded: tuple[bool, ...]
    """Rows without sample and reward: the aborted ones, and the rest of a group that is dropped."""
    counts: Mapping[str, int]


def judge(
    rewards: Sequence[float | None],
    outcomes: Sequence[Outcome | None],
    *,
    group_size: int,
    survivors: int = SURVIVORS,
) -> Judgement:
    """Exclude aborted rows, and whole groups of which fewer than `survivors` are left."""
    excluded: list[bool] = []
    dropped = identical = 0
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        scored = [reward for reward in group if reward is not None]
        keep = len(scored) >= min(survivors, len(group))
        dropped += not keep
        identical += keep and len(set(scored)) == 1
        excluded += [reward is None or not keep for reward in group]
    counts = {
        "episodes/finished": len(rewards),
        "episodes/aborted": sum(reward is None for reward in rewards),
        "episodes/excluded": sum(excluded),
        "groups/finished": -(-len(rewards) // group_size),
        "groups/dropped": dropped,
        "groups/identical_rewards": identical,
    }
    for outcome in outcomes:
        if outcome is not None:
            name = f"episodes/aborted/{outcome}"
            counts[name] = counts.get(name, 0) + 1
    return Judgement(tuple(excluded), counts)
