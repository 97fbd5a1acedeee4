"""Episodes over a provider that fails: refusals, delays, lost answers, outages. One receipt each, nothing left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.errors import InfrastructureLost
from orchestrator.keys import Keys
from orchestrator.reconciler import Reconciler, Report
from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import Outcome
from tests.support.e2b_local import sandbox_request
from tests.support.farm import BUDGETS, KEY, Field, Ground, candidate, open_field, repaired, script
from tests.support.faults import ServiceFaults
from tests.support.terminus import serving
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider

pytest_plugins = ["tests.support.farm", "tests.support.faults"]

BOTH = ("policy", "verifier")


def right(field: Field, **budgets: Any) -> EpisodeSpec:
    """An episode that is solved unless something breaks."""
    return field.spec(script(candidate(repaired())), budgets=BUDGETS.model_copy(update=budgets))


def reconciled(field: Field) -> Report:
    """One round of the reconciler."""
    farm = field.farm
    reconciler = Reconciler("r", ledger=farm.ledger, queue=farm.queue, provider=field.provider, lease_seconds=12)
    return reconciler.run_once()


@pytest.fixture(scope="module")
def hasty(ground: Ground) -> Iterator[tuple[E2BProvider, str]]:
    """A provider that waits one second for an answer, and a Terminus server that has one too."""
    provider = E2BProvider(KEY, api_url=ground.sandboxes.url, request_seconds=1)
    with serving(provider, BUDGETS) as url:
        yield provider, url


# 429, rate kind


@pytest.mark.parametrize("retry_after", [True, False])
@pytest.mark.parametrize("html", [False, True])
def test_a_429_is_waited_out(field: Field, faults: ServiceFaults, retry_after: bool, html: bool) -> None:
    faults.set(rate_limited=1, retry_after=retry_after, html_429=html)
    spec = right(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.statuses(spec.episode_id) == [429, 201, 201]
    kind = "rate" if retry_after else "concurrency"
    assert field.farm.redis.hget(Keys.COUNTERS, f"rate_limited:{kind}") == "1"


def test_episodes_together_keep_to_the_providers_creation_rate(field: Field, faults: ServiceFaults) -> None:
    faults.set(create_rate=2)
    specs = [right(field) for _ in range(3)]
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
    # of the arrival, which the service notes a moment before its limiter looks
    assert min(later - sooner for sooner, later in itertools.pairwise(accepted)) > 0.4


@pytest.mark.parametrize("retry_after", [True, False])
@pytest.mark.parametrize("role", BOTH)
def test_a_creation_that_is_always_rejected_ends_its_episode_with_the_cause(
    field: Field, faults: ServiceFaults, retry_after: bool, role: str
) -> None:
    faults.set(rate_limited="always", retry_after=retry_after, only__role=role)
    spec = right(field, deadline_seconds=4)
    assert field.run(spec) == "deadline"
    settled = field.check_ended(spec.episode_id, Outcome.DEADLINE, roles=BOTH[: BOTH.index(role)])
    assert "RateLimitException" in (settled.receipt.detail or "")
    assert settled.allocations[-1].state == "refused"
    attempts = faults.statuses(f"{spec.episode_id}-a1-{role}")
    assert attempts == [429] * len(attempts)
    assert 2 <= len(attempts) <= 5


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
    spec = right(field)
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
        faults.set(max_sandboxes=1, count_lag_seconds=1.5)
        specs = [right(field) for _ in range(2)]
        threads = [threading.Thread(target=field.run, args=[spec]) for spec in specs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for spec in specs:
            field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
        events = sorted((row for spec in specs for row in field.events(spec.episode_id)), key=lambda row: row["time"])
    assert faults.hits()["max_sandboxes"] >= 3
    assert max(row["live"] for row in events) == 1
    pairs = itertools.pairwise(events)
    waits = [later["time"] - sooner["time"] for sooner, later in pairs if later["event"] == "created"]
    assert len(waits) == 3
    assert min(waits) >= 1.5


# time


@pytest.mark.parametrize("distribution", ["uniform:0:0.2", "lognormal:0.1:0.5"])
def test_latency_of_every_operation_costs_time_only(field: Field, faults: ServiceFaults, distribution: str) -> None:
    operations = ("create", "info", "connect", "delete", "probe", "files", "command")
    faults.set(seed=7, latency=dict.fromkeys(operations, distribution))
    spec = right(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.hits().keys() == {f"latency.{operation}" for operation in operations}


def test_a_sandbox_made_after_its_asker_has_left_is_settled(
    field: Field, faults: ServiceFaults, hasty: tuple[E2BProvider, str]
) -> None:
    provider, url = hasty
    faults.set(latency__create="constant:1.5")
    spec = right(field)
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
    spec = right(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.statuses(f"{spec.episode_id}-a1-{role}") == [None, 201]
    assert faults.hits() == {"lost.create": 1}


@pytest.mark.parametrize("fault", ["lost__create", "bad_gateway__create"])
def test_a_sandbox_whose_answers_are_all_lost_is_found_and_deleted(
    field: Field, faults: ServiceFaults, fault: str
) -> None:
    faults.set(**{fault: "always"})
    spec = right(field)
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
    spec = right(field)
    assert field.run(spec, provider=provider, terminus_url=url) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert sorted(map(str, faults.statuses(f"{spec.episode_id}-a1-policy"))) == ["201", "None"]


# outages


def test_refused_connections_are_waited_out(field: Field, faults: ServiceFaults) -> None:
    faults.set(outage_seconds=2)
    spec = right(field)
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


# 502 and 503


@pytest.mark.parametrize("fault", ["unavailable", "bad_gateway"])
@pytest.mark.parametrize("operation", ["create", "delete"])
def test_a_5xx_is_repeated_without_harm(field: Field, faults: ServiceFaults, fault: str, operation: str) -> None:
    faults.set(**{f"{fault}__{operation}": 1})
    spec = right(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.hits() == {f"{fault}.{operation}": 1}


def test_a_provider_that_stays_unavailable_leaves_an_unknown_that_is_settled_later(
    field: Field, faults: ServiceFaults
) -> None:
    faults.set(unavailable__create="always")
    spec = right(field)
    assert field.run(spec) == "transport"
    settled = field.check_ended(spec.episode_id, Outcome.TRANSPORT, roles=(), unresolved=True)
    assert "ServiceBusyException" in (settled.receipt.detail or "")
    assert faults.statuses(spec.episode_id) == [503, 503, 503]
    assert list(reconciled(field).unresolved) == [settled.allocations[0].allocation_id]
    faults.clear()
    reconciled(field)
    field.check_ended(spec.episode_id, Outcome.TRANSPORT)  # made under its key, only to be deleted by its name


@pytest.mark.parametrize("fault", ["unavailable", "bad_gateway", "lost"])
@pytest.mark.parametrize(("operation", "roles"), [("connect", 1), ("files", 1), ("command", 1)])
def test_a_call_to_a_sandbox_that_fails_aborts(
    field: Field, faults: ServiceFaults, fault: str, operation: str, roles: int
) -> None:
    faults.set(**{f"{fault}__{operation}": 1})
    spec = right(field)
    assert field.run(spec) == "transport"
    field.check_ended(spec.episode_id, Outcome.TRANSPORT, roles=BOTH[:roles])
    assert faults.hits() == {f"{fault}.{operation}": 1}


@pytest.mark.parametrize("role", BOTH)
def test_a_command_whose_stream_is_cut_aborts(field: Field, faults: ServiceFaults, role: str) -> None:
    faults.set(stream_cut="always", only__role=role)
    spec = right(field)
    assert field.run(spec) == "transport"
    field.check_ended(spec.episode_id, Outcome.TRANSPORT, roles=BOTH[: BOTH.index(role) + 1])
    assert faults.hits() == {"stream_cut": 1}


# early deaths


def test_a_sandbox_that_dies_early_is_lost(field: Field, faults: ServiceFaults) -> None:
    faults.set(dies_after_seconds=1)
    spec = field.spec(script("sleep 1.8", "true"))
    assert field.run(spec) == "sandbox_lost"
    field.check_ended(spec.episode_id, Outcome.SANDBOX_LOST)
    assert [row["event"] for row in field.events(spec.episode_id)] == ["created", "lost"]


def test_a_sandbox_that_dies_at_once_is_lost(field: Field, faults: ServiceFaults) -> None:
    faults.set(dies_after_seconds=0.001)
    spec = right(field)
    assert field.run(spec) == "sandbox_lost"
    field.check_ended(spec.episode_id, Outcome.SANDBOX_LOST)


def test_a_sandbox_that_dies_after_a_command_is_lost_at_the_next(field: Field, faults: ServiceFaults) -> None:
    faults.set(dies_after_commands=2)
    spec = field.spec(script("true", "true", "true"))
    assert field.run(spec) == "sandbox_lost"
    settled = field.check_ended(spec.episode_id, Outcome.SANDBOX_LOST)
    assert [step.ok for step in settled.receipt.operations if step.name == "terminal"] == [True, True, False]


def test_a_verifier_that_dies_early_gives_no_score(field: Field, faults: ServiceFaults) -> None:
    faults.set(dies_after_seconds=1, only__role="verifier")
    spec = field.spec(script(candidate("import time; time.sleep(1.8)\n" + repaired())))
    assert field.run(spec) == "sandbox_lost"
    field.check_ended(spec.episode_id, Outcome.SANDBOX_LOST, roles=BOTH)


# deletions


@pytest.mark.parametrize("fault", ["undeletable_seconds", "delete_lag_seconds"])
def test_a_deletion_that_takes_its_time_is_confirmed_before_the_score(
    field: Field, faults: ServiceFaults, fault: str
) -> None:
    faults.set(**{fault: 0.3})
    spec = right(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.hits()[fault.removesuffix("_seconds")] >= 2


@pytest.mark.parametrize("fault", ["undeletable_seconds", "delete_lag_seconds"])
def test_an_answered_deletion_is_no_absence_and_frees_no_permit(
    ground: Ground, faults: ServiceFaults, fault: str
) -> None:
    with open_field(ground, concurrency_limit=1) as field:
        faults.set(**{fault: 6})
        spec = right(field)
        assert field.run(spec) == "cleanup_unresolved"
        settled = field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, unresolved=True)
        assert [row.state for row in settled.allocations] == ["unresolved"]
        (left,) = field.running(spec.episode_id)
        assert left.sandbox_id in (settled.receipt.detail or "")

        other = right(field, admission_seconds=0.5)
        assert field.run(other) == "admission_timeout"
        assert list(reconciled(field).unresolved) == [settled.allocations[0].allocation_id]

        wait_until(lambda: bool(reconciled(field).settled), description="the sandbox is gone")
        field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED)
        faults.clear()
        assert field.run(right(field)) == "solved"


def test_a_deletion_that_is_never_answered_is_settled_later(
    field: Field, faults: ServiceFaults, hasty: tuple[E2BProvider, str]
) -> None:
    provider, url = hasty
    faults.set(hung__delete="always")
    spec = right(field)
    assert field.run(spec, provider=provider, terminus_url=url) == "cleanup_unresolved"
    field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, unresolved=True)
    faults.clear()
    reconciled(field)
    field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED)


def test_a_verifier_that_cannot_be_deleted_takes_the_score_away(field: Field, faults: ServiceFaults) -> None:
    faults.set(undeletable_seconds=600, only__role="verifier")
    spec = right(field)
    assert field.run(spec) == "cleanup_unresolved"
    settled = field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, roles=BOTH, unresolved=True)
    assert settled.receipt.reward is None
    faults.clear()
    reconciled(field)
    field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, roles=BOTH)


# the list


def test_a_list_that_ignores_its_filter_costs_no_other_sandbox_its_life(field: Field, faults: ServiceFaults) -> None:
    tag = field.farm.ledger.farm_tag()
    foreign = [
        field.provider.create(sandbox_request(metadata=metadata)).sandbox_id
        for metadata in ({}, {"farm": f"{tag}-other"}, {"role": "policy", "episode": "e-1", "allocation": "e-1-a1"})
    ]
    faults.set(lost__create="always")
    spec = right(field)
    assert field.run(spec) == "transport"
    faults.set(unavailable__create="always", list_unfiltered=True)  # the key settles nothing now: the list has to
    reconciled(field)
    assert faults.hits()["list_unfiltered"] >= 1
    field.check_ended(spec.episode_id, Outcome.TRANSPORT)
    for sandbox_id in foreign:
        assert field.provider.describe(sandbox_id) is not None
        field.provider.delete(sandbox_id)


def test_faults_by_the_dice_leave_one_receipt_each_and_nothing_else(field: Field, faults: ServiceFaults) -> None:
    often = "10%"
    faults.set(
        seed=11,
        rate_limited=often,
        lost={"create": often, "delete": often, "command": often},
        unavailable={"info": often, "delete": often, "create": often},
        bad_gateway={"create": often, "files": often},
        latency={"create": "lognormal:0.05:1", "delete": "exponential:0.05"},
        delete_lag_seconds=0.2,
    )
    field.worker()
    field.reconcile(every_seconds=1)
    specs = [right(field) for _ in range(8)]
    for spec in specs:
        field.farm.ledger.open(spec)
        field.farm.queue.enqueue(spec, 1)
    for spec in specs:
        field.wait_receipt(spec.episode_id, 60)
    faults.clear()
    wait_until(lambda: not field.farm.ledger.allocations.unsettled(), description="all is settled", seconds=30)
    outcomes = [field.receipt(spec.episode_id).receipt.outcome for spec in specs]
    for spec, outcome in zip(specs, outcomes, strict=True):
        begun = [row["metadata"]["role"] for row in field.events(spec.episode_id) if row["event"] == "created"]
        field.check_ended(spec.episode_id, outcome, roles=BOTH[: len(begun)])
    assert Outcome.SOLVED in outcomes
