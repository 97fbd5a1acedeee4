"""A farm, a trainer's pool and a slot without sandboxes, on the session's Redis; modules override `settings`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.farm import Farm
from orchestrator.pool import Pool
from orchestrator.settings import Settings
from tests.support.bare_farm import TinySlot, farm_of, farm_settings


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url)


@pytest.fixture
def farm(settings: Settings) -> Iterator[Farm]:
    with farm_of(settings) as farm:
        yield farm


@pytest.fixture
def pool(settings: Settings) -> Iterator[Pool]:
    with Pool(settings, run_id="run-test") as pool:
        yield pool
    pool.redis.close()


@pytest.fixture
def slot(settings: Settings) -> Iterator[TinySlot]:
    with TinySlot(settings) as slot:
        yield slot
