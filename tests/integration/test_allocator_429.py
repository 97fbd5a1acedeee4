"""What an episode does about a 429: creations wait in the line, other calls are told to the limiter and asked again."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from redis import Redis

from orchestrator.errors import (
    AuthenticationFailed,
    ConcurrencyLimited,
    CreateRejected,
    EpisodeAborted,
    NothingSent,
    OutcomeUnknown,
    ProviderError,
    RateLimited,
)
from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.limiter import Limiter
from orchestrator.provider import CreateRequest, SandboxRow
from orchestrator.settings import Settings
from orchestrator.vocabulary import AllocationState, Outcome, Role
from tests.support.bare_farm import a_request, farm_settings, stored
from tests.support.fake_provider import FakeProvider
from tests.support.line import end, running
from tests.support.waiting import wait_until
from workers.allocator import Allocator


@dataclass
class Refusing(FakeProvider):
    """Refuses with these errors first, one a call."""

    creates: list[ProviderError] = field(default_factory=list)
    others: list[ProviderError] = field(default_factory=list)
    cap: int = 100

    def send(self, request: CreateRequest) -> tuple[str, None]:
        self.refuse_creates = self.creates.pop(0) if self.creates else None
        if self.refuse_creates is None and len(self.running) >= self.cap:
            self.refuse_creates = ConcurrencyLimited(f"{self.cap} are running")
        return self.create(request).sandbox_id, None

    def delete(self, sandbox_id: str) -> None:
        self._refuse()
        super().delete(sandbox_id)

    def describe(self, sandbox_id: str) -> SandboxRow | None:
        self._refuse()
        return super().describe(sandbox_id)

    def _refuse(self) -> None:
        if self.others:
            raise self.others.pop(0)


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return farm_settings(redis_url, concurrency_limit=5)


def allocator(farm: Farm, provider: Refusing, episode: str, token: str, **changes: Any) -> Allocator:
    return Allocator(
        episode,
        token,
        **{
            "allocations": farm.ledger.allocations,
            "limiter": farm.limiter,
            "provider": provider,
            "check": lambda: None,
            "cleanup_seconds": 20,
            **changes,
        },
    )


def test_refused_creations_are_waited_out_and_counted(farm: Farm) -> None:
    spec, lease = running(farm)
    provider = Refusing(creates=[RateLimited("slow down", 0.2), RateLimited("slow down", 0.2)])
    ours = allocator(farm, provider, spec.episode_id, lease.token)
    owned, _ = ours.create(Role.POLICY, a_request(spec), provider.send, wait_seconds=20)
    reading = farm.limiter.read()
    assert (reading.rate_limited, reading.creations, len(provider.created)) == (2, 3, 3)
    assert reading.rate_effective > 0, "no rate was configured; one was learned"
    assert ours.dispose(owned)
    end(farm, (spec, lease))


def test_a_pause_beyond_the_deadline_ends_the_episode_at_once(farm: Farm) -> None:
    spec, lease = running(farm)
    provider = Refusing(creates=[RateLimited("slow down", 600)])
    with pytest.raises(EpisodeAborted) as ended:
        allocator(farm, provider, spec.episode_id, lease.token).create(
            Role.POLICY, a_request(spec), provider.send, wait_seconds=30
        )
    assert ended.value.outcome is Outcome.DEADLINE
    assert stored(farm, a_request(spec).allocation_id).state is AllocationState.REFUSED
    end(farm, (spec, lease))


def test_one_over_the_cap_waits_for_the_others_deletion(farm: Farm) -> None:
    provider = Refusing(cap=1)
    first, second = running(farm), running(farm)
    holder = allocator(farm, provider, first[0].episode_id, first[1].token)
    owned, _ = holder.create(Role.POLICY, a_request(first[0]), provider.send, wait_seconds=20)
    got: list[str] = []

    def create() -> None:
        ours = allocator(farm, provider, second[0].episode_id, second[1].token)
        theirs, _ = ours.create(Role.POLICY, a_request(second[0]), provider.send, wait_seconds=60)
        got.append(theirs.sandbox_id)
        ours.dispose(theirs)

    thread = threading.Thread(target=create)
    thread.start()
    wait_until(lambda: farm.redis.zcard(Keys.CREATORS) == 1, description="the second one waits")
    assert farm.limiter.read().concurrency_effective == 1
    farm.redis.hset(Keys.LIMITS, "probe_ms", 100_000)
    assert holder.dispose(owned)
    end(farm, first)
    thread.join(20)
    assert got
    assert len(provider.created) == 3, "one for the first, a refused one and one more for the second"
    end(farm, second)


def test_a_429_to_a_deletion_is_told_and_asked_again(farm: Farm) -> None:
    spec, lease = running(farm)
    provider = Refusing()
    ours = allocator(farm, provider, spec.episode_id, lease.token)
    owned, _ = ours.create(Role.POLICY, a_request(spec), provider.send, wait_seconds=20)
    provider.others = [RateLimited("slow down", 0.05), RateLimited("slow down", 0.05), ConcurrencyLimited("no header")]
    assert ours.dispose(owned)
    reading = farm.limiter.read()
    assert reading.concurrency_effective == 5
    assert (reading.rate_limited, reading.concurrency_limited) == (0, 0), "no creation was answered so"
    assert stored(farm, a_request(spec).allocation_id).state is AllocationState.ABSENT
    end(farm, (spec, lease))


@pytest.mark.parametrize(
    ("error", "calls"),
    [(AuthenticationFailed("401"), 1), (CreateRejected("400"), 1), (OutcomeUnknown("no answer"), 4)],
    ids=["wrong key", "rejected", "no answer"],
)
def test_a_deletion_is_repeated_only_where_that_can_help(farm: Farm, error: ProviderError, calls: int) -> None:
    spec, lease = running(farm)
    provider = Refusing()
    ours = allocator(farm, provider, spec.episode_id, lease.token)
    owned, _ = ours.create(Role.POLICY, a_request(spec), provider.send, wait_seconds=20)
    owned.row = owned.row.model_copy(update={"vcpus": 1, "memory_mb": 512})  # nobody asks for its price
    provider.others = [error] * 10
    assert not ours.dispose(owned)
    assert len(provider.others) == 10 - calls
    assert stored(farm, a_request(spec).allocation_id).state is AllocationState.UNRESOLVED
    provider.others = []
    assert ours.dispose(owned)
    end(farm, (spec, lease))


@pytest.mark.parametrize("error", [RateLimited("slow down", 0.1), OutcomeUnknown("no answer")], ids=["429", "unknown"])
def test_all_deletions_of_an_episode_share_the_time_of_its_clean_up(farm: Farm, error: ProviderError) -> None:
    """Past that its lease runs out, and with it goes the score."""
    spec, lease = running(farm)
    provider = Refusing()
    ours = allocator(farm, provider, spec.episode_id, lease.token, cleanup_seconds=2)
    for role in Role:
        ours.create(role, a_request(spec, role), provider.send, wait_seconds=20)
    provider.others = [error] * 1000
    began = time.monotonic()
    assert ours.dispose_all() == [owned.sandbox_id for owned in ours.owned]
    assert time.monotonic() - began < 8, "asking for two prices takes its time, too"
    provider.others = []
    assert ours.dispose_all() == []
    end(farm, (spec, lease))


def test_refused_connections_count_from_the_last_other_answer(farm: Farm) -> None:
    spec, lease = running(farm)
    provider = Refusing(creates=[NothingSent("refused"), RateLimited("slow down", 0.6), NothingSent("refused")])
    ours = allocator(farm, provider, spec.episode_id, lease.token, refused_seconds=0.5)
    owned, _ = ours.create(Role.POLICY, a_request(spec), provider.send, wait_seconds=20)
    assert len(provider.created) == 4
    assert ours.dispose(owned)
    end(farm, (spec, lease))


def test_connections_refused_for_long_end_the_episode(farm: Farm) -> None:
    spec, lease = running(farm)
    provider = Refusing(creates=[NothingSent("refused") for _ in range(29)])
    ours = allocator(farm, provider, spec.episode_id, lease.token, refused_seconds=0.5)
    with pytest.raises(EpisodeAborted) as ended:
        ours.create(Role.POLICY, a_request(spec), provider.send, wait_seconds=60)
    assert ended.value.outcome is Outcome.TRANSPORT
    assert len(provider.created) < 10
    end(farm, (spec, lease))


def test_a_sandbox_is_priced_from_the_first_creation_whose_answer_was_lost(farm: Farm) -> None:
    spec, lease = running(farm)
    provider = Refusing(lose_create_answers=1)
    ours = allocator(farm, provider, spec.episode_id, lease.token)
    answered: list[None] = []

    def send(request: CreateRequest) -> tuple[str, None]:
        answered.append(None)
        if len(answered) == 2:
            raise RateLimited("slow down", 1.0)
        return provider.send(request)

    owned, _ = ours.create(Role.POLICY, a_request(spec), send, wait_seconds=20)
    assert ours.dispose(owned)
    ran = stored(farm, owned.row.allocation_id).running_seconds
    assert ran is not None
    assert ran >= 1.4, "half a second's rest after the lost answer, then the pause that was asked for"
    assert len(provider.sandboxes) == 1
    end(farm, (spec, lease))


def test_what_is_abandoned_while_redis_is_away_is_deleted_all_the_same(farm: Farm) -> None:
    episodes = [running(farm), running(farm)]
    provider = Refusing()
    abandoning = allocator(farm, provider, episodes[0][0].episode_id, episodes[0][1].token, limiter=_away())
    for spec, lease in episodes:
        ours = allocator(farm, provider, spec.episode_id, lease.token)
        ours.create(Role.POLICY, a_request(spec), provider.send, wait_seconds=20)
        abandoning.owned += ours.owned
    provider.others = [RateLimited("slow down", 1)]
    abandoning.abandon()
    assert provider.running == {}
    for owned, (_, lease) in zip(abandoning.owned, episodes, strict=True):
        farm.ledger.allocations.absent(stored(farm, owned.row.allocation_id), lease.token, running_ms=1)
    end(farm, *episodes)


def _away() -> Limiter:
    """A limiter whose Redis does not answer: nobody listens at port 1."""
    return Limiter(Redis(port=1, decode_responses=True), concurrency_limit=5, creation_rate=0)
