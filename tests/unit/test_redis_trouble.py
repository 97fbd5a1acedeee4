"""What a failure of Redis is about: errors that say it in odd ways."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError

from orchestrator.redis_trouble import diagnose


@pytest.mark.timeout(10)
def test_a_ring_of_causes_has_an_end() -> None:
    """What is raised again while its own consequence is handled points at itself in the end."""
    first, second = RedisConnectionError("away"), RedisConnectionError("still away")
    first.__context__, second.__context__ = second, first
    assert "away" in str(diagnose(first))


def test_a_replica_is_called_one_though_its_answer_counts_as_an_outage() -> None:
    error = RedisConnectionError("no primary any more: You can't write against a read only replica.")
    error.__cause__ = ReadOnlyError("You can't write against a read only replica.")
    assert "is a replica and takes no writes; point REDIS_URL at the primary" in str(diagnose(error))
