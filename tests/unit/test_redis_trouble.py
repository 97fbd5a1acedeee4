"""What a failure of Redis is about: errors that say it in odd ways."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from orchestrator.redis_trouble import diagnose


@pytest.mark.timeout(10)
def test_a_ring_of_causes_has_an_end() -> None:
    """What is raised again while its own consequence is handled points at itself in the end."""
    first, second = RedisConnectionError("away"), RedisConnectionError("still away")
    first.__context__, second.__context__ = second, first
    assert "away" in str(diagnose(first))
