"""A 429 that names no header and is of the rate kind all the same: found out by how many run, never by its text."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from orchestrator.creations import Creation
from orchestrator.errors import ConcurrencyLimited
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.records import EpisodeSpec
from orchestrator.rows import Lease
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome
from tests.bench.creator import farm_slot
from tests.support.bare_farm import farm_settings, intended, stored
from tests.support.creators import create
from tests.support.farm import Field, open_field
from tests.support.faults import BOTH, ServiceFaults, solvable
from tests.support.ground import Ground
from tests.support.line import end, running

pytest_plugins = ["tests.support.farm", "tests.support.faults"]

REFUSAL = ConcurrencyLimited("429, and no header")
Episode = tuple[EpisodeSpec, Lease]


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=10)


def test_while_fewer_run_than_lately_it_is_of_the_rate_kind(farm: Farm, redis: Redis) -> None:
    episodes = [with_sandbox(farm) for _ in range(3)]
    without_sandbox(farm, episodes[0])
    redis.hset(Keys.LIMITS, "freed_at", 0)  # long ago
    refused, creation = asking(farm)
    creation.refused(REFUSAL)
    reading = farm.limiter.read()
    assert reading.concurrency_effective == 10
    assert reading.cooldown_seconds > 0
    assert reading.refused_rate > 0, "no rate was configured; one was learned"
    finish(farm, *episodes[1:])
    end(farm, episodes[0], refused)


def test_with_as_many_as_ever_it_is_of_the_concurrency_kind(farm: Farm) -> None:
    episodes = [with_sandbox(farm) for _ in range(3)]
    refused, creation = asking(farm)
    creation.refused(REFUSAL)
    reading = farm.limiter.read()
    assert (reading.concurrency_effective, reading.cooldown_seconds, reading.refused_rate) == (3, 0, 0)
    finish(farm, *episodes)
    end(farm, refused)


@pytest.mark.parametrize("deleted", [False, True])
def test_one_more_that_runs_without_a_deletion_lifts_the_limit(farm: Farm, redis: Redis, deleted: bool) -> None:
    episodes = [with_sandbox(farm), with_sandbox(farm)]
    refused, creation = asking(farm)
    creation.refused(REFUSAL)
    assert farm.limiter.read().concurrency_effective == 2
    redis.hset(Keys.LIMITS, "probe_ms", 0)
    creation.wait(wait_seconds=10, check=lambda: None)
    if deleted:
        redis.hset(Keys.LIMITS, "freed_at", int(farm.ledger.now() * 1000))
    with_sandbox(farm, refused)
    assert farm.limiter.read().concurrency_effective == (3 if deleted else 10)
    finish(farm, *episodes, refused)


def test_deletions_explain_three_refusals_one_after_another(farm: Farm, redis: Redis) -> None:
    episodes = [asking(farm) for _ in range(4)]
    redis.hset(Keys.LIMITS, "freed_at", int(farm.ledger.now() * 1000))
    rests = [creation.refused(REFUSAL) for _, creation in episodes[:3]]
    assert all(rest > 0 for rest in rests)
    assert farm.limiter.read().cooldown_seconds == 0
    assert episodes[3][1].refused(REFUSAL) == 0
    reading = farm.limiter.read()
    assert (reading.concurrency_effective, reading.cooldown_seconds > 0) == (10, True)
    end(farm, *(episode for episode, _ in episodes))


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A provider of five creations a second whose 429s say nothing, and its log."""
    log = tmp_path / "creations.jsonl"
    options = ["--rate", "5", "--burst", "5", "--cap", "1000", "--log", str(log), "--silent"]
    command = [sys.executable, "-m", "tests.support.metered", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), log
        process.communicate(timeout=20)


def test_a_provider_that_names_nothing_refuses_few_creations(silent: tuple[str, Path], redis_url: str) -> None:
    api_url, log = silent
    ends = time.monotonic() + 20
    slots = [threading.Thread(target=farm_slot, args=(f"s{n}", api_url, redis_url, 10, 100, ends)) for n in range(8)]
    for slot in slots:
        slot.start()
    for slot in slots:
        slot.join(60)
    statuses = [json.loads(line)[1] for line in log.read_text().splitlines()]
    assert 429 in statuses
    assert statuses.count(429) < 0.1 * len(statuses)


def test_the_local_services_silent_rate_is_learned(ground: Ground, faults: ServiceFaults) -> None:
    with open_field(ground, concurrency_limit=10) as field:
        faults.set(create_rate=2, retry_after=False)
        specs = [solvable(field) for _ in range(4)]
        threads = [threading.Thread(target=field.run, args=[spec]) for spec in specs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        for spec in specs:
            field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
        refused_again(field, faults)


def refused_again(field: Field, faults: ServiceFaults) -> None:
    """One refusal more while fewer run than did: taken for what it is."""
    faults.set(rate_limited=1, retry_after=False)
    field.farm.redis.hset(Keys.LIMITS, "freed_at", 0)
    field.farm.redis.hdel(Keys.LIMITS, "cooldown_until", "refused_rate")
    before = field.farm.limiter.read().concurrency_effective
    spec = solvable(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    reading = field.farm.limiter.read()
    assert reading.concurrency_effective >= before
    assert reading.refused_rate > 0


def with_sandbox(farm: Farm, episode: Episode | None = None) -> Episode:
    """An episode whose policy sandbox runs."""
    if episode is None:
        episode = running(farm)
        create(farm, episode[0].episode_id)
    spec, lease = episode
    row = intended(farm, spec, lease)
    farm.ledger.allocations.created(row, f"sbx-{spec.episode_id}", lease.token, creating_ms=1)
    return episode


def without_sandbox(farm: Farm, episode: Episode) -> None:
    """It is confirmed absent; the episode goes on."""
    spec, lease = episode
    [name] = farm.ledger.allocation_ids(spec.episode_id)
    farm.ledger.allocations.absent(stored(farm, name), lease.token, running_ms=1)


def finish(farm: Farm, *episodes: Episode) -> None:
    """Sandboxes and episodes end."""
    for episode in episodes:
        without_sandbox(farm, episode)
    end(farm, *episodes)


def asking(farm: Farm) -> tuple[Episode, Creation]:
    """An episode that has its leave to create."""
    episode = running(farm)
    return episode, create(farm, episode[0].episode_id)
