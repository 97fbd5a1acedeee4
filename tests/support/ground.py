"""The servers under the farm tests, one of each a session: Redis, the local sandbox service, a Terminus server."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from deploy.embedded import EmbeddedRedis, LocalSandboxes
from orchestrator.settings import Budgets, Settings
from tests.support.terminus import terminus_server

KEY = "farm-test-key"

BUDGETS = Budgets(
    admission_seconds=30,
    reserved_admission_seconds=20,
    deadline_seconds=60,
    policy_window_seconds=30,
    command_seconds=2,
    message_seconds=8,
    verifier_command_seconds=8,
    cleanup_seconds=20,
)
"""Like the defaults, but a command that hangs costs a test two seconds instead of ten."""

_DATABASES = itertools.cycle(range(12))
_LASTING_DATABASES = set(range(12, 16))
"""Free ones for farms that live longer than a test; nobody else empties them."""


@dataclass(frozen=True)
class Ground:
    """What lasts for the whole session."""

    redis: EmbeddedRedis
    sandboxes: LocalSandboxes
    terminus_url: str
    directory: Path


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Redis, the sandbox service and a Terminus server."""
    directory = tmp_path_factory.mktemp("ground")
    with (
        EmbeddedRedis(directory / "redis", appendfsync="no") as redis,
        LocalSandboxes(directory / "sandboxes", api_key=KEY) as sandboxes,
        terminus_server(sandboxes.url, BUDGETS, key=KEY) as (terminus_url, _),
    ):
        yield Ground(redis, sandboxes, terminus_url, directory)


@contextmanager
def lasting_database() -> Iterator[int]:
    """A database that is nobody else's until the block ends."""
    assert _LASTING_DATABASES, "more farms are open at once than this Redis has databases for"
    number = _LASTING_DATABASES.pop()
    try:
        yield number
    finally:
        _LASTING_DATABASES.add(number)


def open_settings(ground: Ground, *, database: int | None = None, **changes: Any) -> Settings:
    """Settings that reach the session's servers and an empty database."""
    number = next(_DATABASES) if database is None else database
    url = re.sub(r"db=\d+", f"db={number}", ground.redis.url)
    with Redis.from_url(url) as redis:
        redis.flushdb()
    given: dict[str, Any] = {
        "redis_url": url,
        "e2b_api_key": KEY,
        "e2b_api_url": ground.sandboxes.url,
        "budgets": BUDGETS,
        "state_dir": ground.directory / "state",
    }
    return Settings(_env_file=None, **{**given, **changes})  # type: ignore[call-arg]
