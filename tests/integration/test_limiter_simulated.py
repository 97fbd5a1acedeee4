"""Episodes on the real scripts and a clock of their own: the invariants that the benchmark states at scale."""

from __future__ import annotations

import pytest

from tests.bench.simulation import simulate


@pytest.mark.parametrize(("concurrency", "rate"), [(15, 5), (40, 20), (15, 0)])
def test_every_episode_ends_once_and_nothing_is_left(concurrency: int, rate: float) -> None:
    world = simulate(concurrency=concurrency, rate=rate, episodes=150, slots=20, cap=15)
    assert world.provider.created >= 150
    assert world.provider.highest <= 15
    if concurrency <= 15:
        assert world.most_permits <= 15
    else:
        assert world.provider.refused < 0.1 * world.provider.created


def test_our_own_limit_holds_where_the_provider_would_take_many_more() -> None:
    world = simulate(concurrency=10, rate=5, episodes=150, slots=20, cap=1000)
    assert (world.most_permits, world.provider.highest) == (10, 10)
    assert world.dead > 0
