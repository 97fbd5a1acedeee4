"""How many of a run's episodes are open, counted where they lie: among a hundred thousand of other runs' as well."""

from __future__ import annotations

import itertools
from collections import Counter

from redis import Redis

from orchestrator.keys import Keys
from orchestrator.scripts import Scripts
from orchestrator.vocabulary import EpisodeState

_COUNTED_AT_ONCE = 2000
"""Rows that one script looks at: a few milliseconds in which Redis answers nobody else."""


def count_open(redis: Redis, run_id: str) -> dict[EpisodeState, int]:
    """How many open episodes of the run are in each state that any is in."""
    scripts = Scripts(redis)
    counts: Counter[EpisodeState] = Counter()
    for first in itertools.count(0, _COUNTED_AT_ONCE):
        args: list[str | int | float] = [Keys.episode(""), run_id, first, first + _COUNTED_AT_ONCE - 1]
        looked, *found = scripts.run("count_run", [Keys.OPEN], args)
        counts.update({EpisodeState(state): int(count) for state, count in zip(*[iter(found)] * 2, strict=True)})
        if looked < _COUNTED_AT_ONCE:
            break
    return dict(counts)
