"""Episodes whose creations are refused, delayed, lost or hung: one receipt each, nothing left, nothing made twice."""

from __future__ import annotations

import itertools
import threading

import pytest

from orchestrator.errors import EpisodeAborted, InfrastructureLost
from orchestrator.keys import Keys
from orchestrator.provider import Sandbox
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import a_receipt, a_request
from tests.support.e2b_local import sandbox_request
from tests.support.farm import Field, open_field
from tests.support.faults import BOTH, ServiceFaults, reconciled, solvable
from tests.support.ground import KEY, Ground
from tests.support.line import running
from tests.support.policies import candidate, repaired, script
from tests.support.waiting import wait_until
from workers.allocator import Allocator
from workers.sandboxes.provider import E2BProvider

pytest_plugins = ["tests.support.farm", "tests.support.faults"]


# 429, rate kind


@pytest.mark.parametrize("retry_after", [True, False])
@pytest.mark.parametrize("html", [False, True])
def test_a_429_is_waited_out(field: Field, faults: ServiceFaults, retry_after: bool, html: bool) -> None:
    faults.set(rate_limited=1, retry_after=retry_after, html_429=html)
    spec = solvable(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.statuses(spec.episode_id) == [429, 201, 201]
    kind = "rate" if retry_after or html else "concurrency"
    assert field.farm.redis.hget(Keys.COUNTERS, f"rate_limited:{kind}") == "1"


def test_episodes_together_keep_to_the_providers_creation_rate(field: Field, faults: ServiceFaults) -> None:
    faults.set(create_rate=2)
    specs = [solvable(field) for _ in range(3)]
    threads = [threading.Thread(target=field.run, args=[spec]) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for spec in specs:
        field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.hits()["create_rate"] >= 1
    accepted = sorted(row["time"] for row in faults.creations()["attempts"] if row["status"] == 201)
    assert len(accepted) == 6
    assert accepted[-1] - accepted[0] > 2  # 2.5, but a time is noted a moment before the limiter looks


@pytest.mark.parametrize("retry_after", [True, False])
@pytest.mark.parametrize("role", BOTH)
def test_a_creation_that_is_always_rejected_ends_its_episode_with_the_cause(
    field: Field, faults: ServiceFaults, retry_after: bool, role: str
) -> None:
    faults.set(rate_limited="always", retry_after=retry_after, only__role=role)
    spec = solvable(field, deadline_seconds=4)
    assert field.run(spec) == "deadline"
    settled = field.check_ended(spec.episode_id, Outcome.DEADLINE, roles=BOTH[: BOTH.index(role)])
    assert "RateLimitException" in (settled.receipt.detail or "")
    assert settled.allocations[-1].state == "refused"
    attempts = faults.statuses(f"{spec.episode_id}-a1-{role}")
    assert attempts == [429] * len(attempts)
    assert 1 <= len(attempts) <= 5


def test_a_creation_is_attempted_thirty_times_and_no_more_however_short_the_pauses(
    field: Field, faults: ServiceFaults
) -> None:
    """The limiter makes minutes of them; here what it has learned is forgotten before each."""
    faults.set(rate_limited="always")
    spec, lease = running(field.farm)
    allocator = Allocator(
        spec.episode_id,
        lease.token,
        allocations=field.farm.ledger.allocations,
        limiter=field.farm.limiter,
        provider=field.provider,
        check=lambda: field.farm.limiter.change(reset=True),
        cleanup_seconds=1,
    )
    with pytest.raises(EpisodeAborted, match=r"no sandbox could be created: .*RateLimitException") as ended:
        allocator.create(
            Role.POLICY,
            a_request(spec),
            lambda request: (field.provider.create(request).sandbox_id, None),
            wait_seconds=120,
        )
    assert ended.value.outcome is Outcome.DEADLINE
    assert faults.statuses(a_request(spec).allocation_id) == [429] * 30
    field.farm.ledger.commit(a_receipt(spec, Outcome.DEADLINE), lease.token)


def test_an_episode_cancelled_between_two_attempts_holds_nothing(field: Field, faults: ServiceFaults) -> None:
    faults.set(rate_limited="always")
    started = field.remote(field.spec())
    faults.wait_hits("rate_limited")
    field.farm.ledger.cancel(started.episode.episode_id)
    started.end()
    settled = field.check_ended(started.episode.episode_id, Outcome.CANCELLED, roles=())
    assert [row.state for row in settled.allocations] == ["refused"]
    assert "RateLimitException" in (settled.receipt.detail or "")


def test_a_creation_that_can_never_be_accepted_is_sent_once(field: Field, faults: ServiceFaults) -> None:
    spec = field.spec(script(candidate(repaired())), template="no-such-template")
    assert field.run(spec) == "setup_failed"
    settled = field.check_ended(spec.episode_id, Outcome.SETUP_FAILED, roles=())
    assert "no-such-template" in (settled.receipt.detail or "")
    assert faults.statuses(spec.episode_id) == [404]


# 429, concurrency kind


def test_a_full_provider_is_waited_for(field: Field, faults: ServiceFaults) -> None:
    other = field.provider.create(sandbox_request()).sandbox_id
    faults.set(max_sandboxes=1)
    spec = solvable(field)
    running = threading.Thread(target=field.run, args=[spec])
    running.start()
    faults.wait_hits("max_sandboxes")
    field.provider.delete(other)
    running.join(30)
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.statuses(spec.episode_id)[0] == 429
    assert faults.creations()["most_live"] == 1


def test_a_place_is_not_used_again_while_the_provider_still_counts_the_old_sandbox(
    ground: Ground, faults: ServiceFaults
) -> None:
    with open_field(ground, concurrency_limit=1) as field:
        faults.set(max_sandboxes=1, count_lag_seconds=1)
        specs = [solvable(field) for _ in range(2)]
        threads = [threading.Thread(target=field.run, args=[spec]) for spec in specs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for spec in specs:
            field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
        events = sorted((row for spec in specs for row in field.events(spec.episode_id)), key=lambda row: row["time"])
    assert faults.hits()["max_sandboxes"] >= 1
    assert max(row["live"] for row in events) == 1
    pairs = itertools.pairwise(events)
    waits = [later["time"] - sooner["time"] for sooner, later in pairs if later["event"] == "created"]
    assert len(waits) == 3
    assert min(waits) >= 1
    names = [f"{spec.episode_id}-a1-{role}" for spec in specs for role in BOTH]
    refused = {name: faults.statuses(name).count(429) for name in names}
    assert max(refused.values()) <= 2, f"the provider was asked again and again: {refused}"


# time


@pytest.mark.parametrize("distribution", ["uniform:0:0.2", "lognormal:0.1:0.5"])
def test_latency_of_every_operation_costs_time_only(field: Field, faults: ServiceFaults, distribution: str) -> None:
    operations = ("create", "info", "connect", "delete", "probe", "files", "command")
    faults.set(seed=7, latency=dict.fromkeys(operations, distribution))
    spec = solvable(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.hits().keys() == {f"latency.{operation}" for operation in operations}


class Attaching(E2BProvider):
    """Notes the life that each sandbox is given once its id is known."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(KEY, api_url=ground.sandboxes.url)
        self.lives: list[int] = []

    def attach(self, sandbox_id: str, *, lifetime_seconds: int) -> Sandbox:
        """As ever."""
        self.lives.append(lifetime_seconds)
        return super().attach(sandbox_id, lifetime_seconds=lifetime_seconds)


def test_a_sandbox_whose_creation_was_answered_late_outlives_its_reservation_by_nothing(
    field: Field, faults: ServiceFaults
) -> None:
    """Money is reserved from the sending on: what the answer took is taken off the life that follows."""
    faults.set(latency__create="constant:2.2", only__role="policy")
    provider = Attaching(field.ground)
    spec = solvable(field)
    assert field.run(spec, provider=provider) == "solved"
    [life] = provider.lives
    assert 0 < life <= spec.budgets.policy_lifetime_seconds - 2
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


def test_a_sandbox_made_after_its_asker_has_left_is_settled(
    field: Field, faults: ServiceFaults, hasty: tuple[E2BProvider, str]
) -> None:
    provider, url = hasty
    faults.set(latency__create="constant:1.5")
    spec = solvable(field)
    assert field.run(spec, provider=provider, terminus_url=url) == "transport"
    settled = field.check_ended(spec.episode_id, Outcome.TRANSPORT, unresolved=True)
    assert [row.state for row in settled.allocations] == ["unknown"]
    assert field.farm.redis.zscore(Keys.PERMITS, spec.episode_id) is not None
    wait_until(lambda: len(faults.statuses(spec.episode_id)) == 3, description="the last one is made and not answered")
    assert faults.statuses(spec.episode_id) == [None, None, None]
    faults.clear()
    assert reconciled(field).settled == [row.allocation_id for row in settled.allocations]
    field.check_ended(spec.episode_id, Outcome.TRANSPORT)


# lost and hung


@pytest.mark.parametrize("role", BOTH)
def test_a_lost_create_answer_is_asked_for_again_under_its_key(field: Field, faults: ServiceFaults, role: str) -> None:
    faults.set(lost__create=1, only__role=role)
    spec = solvable(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.statuses(f"{spec.episode_id}-a1-{role}") == [None, 201]
    assert faults.hits() == {"lost.create": 1}


@pytest.mark.parametrize("fault", ["lost__create", "bad_gateway__create"])
def test_a_sandbox_whose_answers_are_all_lost_is_found_and_deleted(
    field: Field, faults: ServiceFaults, fault: str
) -> None:
    faults.set(**{fault: "always"})
    spec = solvable(field)
    assert field.run(spec) == "transport"
    settled = field.check_ended(spec.episode_id, Outcome.TRANSPORT, unresolved=True)
    assert [row.state for row in settled.allocations] == ["unknown"]
    assert len(field.running(spec.episode_id)) == 1
    assert field.farm.redis.zscore(Keys.PERMITS, spec.episode_id) is not None
    assert len(faults.statuses(spec.episode_id)) == 3
    faults.clear()
    reconciled(field)
    field.check_ended(spec.episode_id, Outcome.TRANSPORT)


def test_a_hung_creation_is_asked_for_again(
    field: Field, faults: ServiceFaults, hasty: tuple[E2BProvider, str]
) -> None:
    provider, url = hasty
    faults.set(hung__create=1)
    spec = solvable(field)
    assert field.run(spec, provider=provider, terminus_url=url) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert sorted(map(str, faults.statuses(f"{spec.episode_id}-a1-policy"))) == ["201", "None"]


# outages


def test_refused_connections_are_waited_out(field: Field, faults: ServiceFaults) -> None:
    faults.set(outage_seconds=2)
    spec = solvable(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


def test_an_outage_half_way_aborts_and_what_it_left_is_deleted(field: Field, faults: ServiceFaults) -> None:
    started = field.remote(field.spec())
    started.episode.reset()
    episode_id = started.episode.episode_id
    faults.set(outage_seconds=6)
    with pytest.raises(InfrastructureLost) as caught:
        started.episode.terminal("true")
    assert caught.value.outcome is Outcome.TRANSPORT
    started.end()
    assert [row.state for row in field.receipt(episode_id).allocations] == ["unresolved"]
    assert field.farm.redis.zscore(Keys.PERMITS, episode_id) is not None
    faults.clear()
    reconciled(field)
    field.check_ended(episode_id, Outcome.TRANSPORT)
