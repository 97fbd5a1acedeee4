"""How a typed failure crosses the OpenEnv wire: as data in an observation's metadata, never as text to guess at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.errors import (
    AnswerLate,
    ArtifactMissing,
    ArtifactTooLarge,
    AuthenticationFailed,
    ConcurrencyLimited,
    CreateRejected,
    NothingSent,
    OutcomeUnknown,
    ProviderError,
    RateLimited,
    SandboxGone,
    ServerAtCapacity,
)

_CLASSES: tuple[type[ProviderError], ...] = (
    ProviderError,
    AuthenticationFailed,
    CreateRejected,
    NothingSent,
    ServerAtCapacity,
    RateLimited,
    ConcurrencyLimited,
    OutcomeUnknown,
    AnswerLate,
    SandboxGone,
    ArtifactMissing,
    ArtifactTooLarge,
)


def kind_of(failure: type[ProviderError]) -> str:
    """The wire name of a class of failures: its name in snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", failure.__name__).lower()


KINDS: dict[str, type[ProviderError]] = {kind_of(failure): failure for failure in _CLASSES}
"""The one table, read in both directions."""


def to_wire(error: ProviderError) -> dict[str, Any]:
    """`{kind, detail}`, and `retry_after_seconds` when the provider named it."""
    failure = {"kind": kind_of(type(error)), "detail": str(error)}
    if isinstance(error, RateLimited) and error.retry_after_seconds is not None:
        return {**failure, "retry_after_seconds": error.retry_after_seconds}
    return failure


def from_wire(failure: Mapping[str, Any]) -> ProviderError:
    """The error that `to_wire` was given; an unknown kind (a newer server) is OutcomeUnknown, the careful reading."""
    detail = str(failure.get("detail", ""))
    error = KINDS.get(str(failure.get("kind")), OutcomeUnknown)
    if error is RateLimited:
        return RateLimited(detail, failure.get("retry_after_seconds"))
    return error(detail)
