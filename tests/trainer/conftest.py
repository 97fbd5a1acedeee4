"""The farm that the trainer's tests train against: real workers, started once. Third parties' warnings are let by."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from orchestrator.pool import Pool
from tests.support.farm import Field, open_field
from tests.support.ground import Ground
from tests.support.ground import ground as ground
from tests.support.waiting import wait_until
from trainer.environment import RemoteEpisodes

SLOTS = 4

TOLERATED = (
    "ignore:`torch.jit.script:DeprecationWarning",
    "ignore:.*pin_memory.*:UserWarning",
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what torch and TRL warn of on a machine without accelerator pass; our own warnings stay errors."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for spec in TOLERATED:
                item.add_marker(pytest.mark.filterwarnings(spec))


@pytest.fixture(scope="session")
def training_field(ground: Ground) -> Iterator[Field]:
    """Two workers with two slots each, for all tests here."""
    with open_field(ground, own_database=True, trainer_beat_seconds=1, trainer_lost_seconds=6) as field:
        for name in ("w1", "w2"):
            field.start_worker(name)
        for worker in field.workers:
            worker.wait_ready()
        wait_until(
            lambda: field.farm.limiter.capacity().live_slots == SLOTS, description="every slot said that it is alive"
        )
        yield field


@pytest.fixture
def farm(training_field: Field) -> Iterator[Field]:
    """The farm; checks after the test that nothing of it is held or open."""
    yield training_field
    free = training_field.farm.limiter.capacity
    wait_until(lambda: free().free == SLOTS, description="all places are free again", seconds=20)
    assert training_field.provider.list({}) == []


@pytest.fixture
def pool(farm: Field) -> Iterator[Pool]:
    """A trainer's connection."""
    with Pool(farm.settings) as pool:
        yield pool
    pool.redis.close()


@pytest.fixture
def episodes(pool: Pool) -> Iterator[RemoteEpisodes]:
    """Environments that end the run when an episode is aborted."""
    with RemoteEpisodes(pool) as episodes:
        yield episodes
