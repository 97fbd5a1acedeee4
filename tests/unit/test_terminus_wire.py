"""Typed failures over the wire."""

from __future__ import annotations

import json

import pytest

from orchestrator import errors
from orchestrator.errors import OutcomeUnknown, ProviderError, RateLimited
from workers.terminus.wire import KINDS, from_wire, to_wire


@pytest.mark.parametrize("kind", KINDS)
def test_every_failure_survives_the_wire(kind: str) -> None:
    error = from_wire(json.loads(json.dumps(to_wire(KINDS[kind]("why")))))
    assert type(error) is KINDS[kind]
    assert str(error) == "why"


def test_every_provider_error_of_the_farm_has_a_kind() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ProviderError)]
    assert set(KINDS.values()) == set(classes)
    assert KINDS["rate_limited"] is RateLimited


def test_the_time_to_wait_survives_the_wire() -> None:
    error = from_wire(to_wire(RateLimited("slow", 7.5)))
    assert isinstance(error, RateLimited)
    assert error.retry_after_seconds == 7.5


@pytest.mark.parametrize("failure", [{}, {"kind": "from_the_future", "detail": "x"}, {"kind": None}])
def test_a_kind_that_is_not_known_is_read_carefully(failure: dict[str, object]) -> None:
    assert isinstance(from_wire(failure), OutcomeUnknown)
