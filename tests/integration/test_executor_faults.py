"""Episodes over sandboxes that fail, die, cannot be deleted or are listed wrongly: one receipt each, nothing left."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from orchestrator.errors import InfrastructureLost
from orchestrator.provider import SandboxRow
from orchestrator.vocabulary import Outcome
from tests.support.e2b_local import sandbox_request
from tests.support.farm import Field, open_field
from tests.support.faults import BOTH, ServiceFaults, reconciled, solvable
from tests.support.ground import KEY, Ground
from tests.support.policies import candidate, repaired, script
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider

pytest_plugins = ["tests.support.farm", "tests.support.faults"]


# 502 and 503


@pytest.mark.parametrize("fault", ["unavailable", "bad_gateway"])
@pytest.mark.parametrize("operation", ["create", "info", "delete"])
def test_a_5xx_is_repeated_without_harm(field: Field, faults: ServiceFaults, fault: str, operation: str) -> None:
    faults.set(**{f"{fault}__{operation}": 1})
    spec = solvable(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.hits() == {f"{fault}.{operation}": 1}


def test_a_provider_that_stays_unavailable_leaves_an_unknown_that_is_settled_later(
    field: Field, faults: ServiceFaults
) -> None:
    faults.set(unavailable__create="always")
    spec = solvable(field)
    assert field.run(spec) == "transport"
    settled = field.check_ended(spec.episode_id, Outcome.TRANSPORT, roles=(), unresolved=True)
    assert "ServiceBusyException" in (settled.receipt.detail or "")
    assert faults.statuses(spec.episode_id) == [503, 503, 503]
    assert list(reconciled(field).unresolved) == [settled.allocations[0].allocation_id]
    faults.clear()
    reconciled(field)
    field.check_ended(spec.episode_id, Outcome.TRANSPORT)  # made under its key, only to be deleted by its name


@pytest.mark.parametrize("role", BOTH)
@pytest.mark.parametrize(("operation", "times"), [("probe", 1), ("info", 3), ("files", 1), ("command", 1)])
def test_a_call_to_a_sandbox_that_fails_aborts(
    field: Field, faults: ServiceFaults, operation: str, times: int, role: str
) -> None:
    faults.set(**{f"unavailable__{operation}": times}, only__role=role)
    spec = solvable(field)
    assert field.run(spec) == "transport"
    field.check_ended(spec.episode_id, Outcome.TRANSPORT, roles=BOTH[: BOTH.index(role) + 1])
    assert faults.hits() == {f"unavailable.{operation}": times}


@pytest.mark.parametrize("fault", ["bad_gateway", "lost"])
@pytest.mark.parametrize("operation", ["connect", "files", "command"])
def test_what_was_done_and_not_answered_is_not_done_again(
    field: Field, faults: ServiceFaults, fault: str, operation: str
) -> None:
    faults.set(**{f"{fault}__{operation}": 1})
    spec = solvable(field)
    assert field.run(spec) == "transport"
    field.check_ended(spec.episode_id, Outcome.TRANSPORT)
    assert faults.hits() == {f"{fault}.{operation}": 1}


@pytest.mark.parametrize("status", [200, 400, 499, 500, 504, 520])
@pytest.mark.parametrize("role", BOTH)
def test_a_proxys_page_at_a_command_is_no_result_of_it(
    field: Field, faults: ServiceFaults, status: int, role: str
) -> None:
    faults.set(page__command=1, page_status=status, only__role=role)
    spec = solvable(field)
    assert field.run(spec) == "transport"
    field.check_ended(spec.episode_id, Outcome.TRANSPORT, roles=BOTH[: BOTH.index(role) + 1])
    assert faults.hits() == {"page.command": 1}


@pytest.mark.parametrize("status", [200, 404, 500, 520])
def test_a_proxys_pages_at_the_artifact_do_not_say_that_it_is_missing(
    field: Field, faults: ServiceFaults, status: int
) -> None:
    started = field.remote(field.spec())
    started.episode.reset()
    started.episode.terminal(candidate(repaired()))
    faults.set(page__files=20, page_status=status)
    with pytest.raises(InfrastructureLost):
        started.episode.submit()
    faults.clear()
    started.end()
    assert started.episode.wait().outcome is Outcome.TRANSPORT


@pytest.mark.parametrize("pages", [2, 20])
def test_a_page_is_no_artifact(field: Field, faults: ServiceFaults, pages: int) -> None:
    faults.set(page__download=pages, page_status=200)
    spec = solvable(field)
    assert field.run(spec) == "solved"
    assert faults.hits() == {"page.download": min(pages, 3)}


def test_a_page_is_no_empty_artifact_either(field: Field, faults: ServiceFaults) -> None:
    faults.set(page__download="always", page_status=200)
    spec = field.spec(script(": > report.py"))
    assert field.run(spec) == "candidate_failed"
    assert field.check_ended(spec.episode_id, Outcome.CANDIDATE_FAILED, roles=BOTH).receipt.sizes["artifact"] == 0


@pytest.mark.parametrize("role", BOTH)
def test_a_command_that_never_reached_the_agent_is_no_timeout_of_it(
    field: Field, faults: ServiceFaults, role: str
) -> None:
    faults.set(hung__command=1, only__role=role)
    spec = solvable(field)
    assert field.run(spec) == "transport"
    field.check_ended(spec.episode_id, Outcome.TRANSPORT, roles=BOTH[: BOTH.index(role) + 1])


@pytest.mark.parametrize("role", BOTH)
def test_a_command_whose_answer_is_lost_on_its_way_is_no_timeout_of_it(
    field: Field, faults: ServiceFaults, role: str
) -> None:
    faults.set(stream_stalled="always", only__role=role)
    spec = solvable(field)
    assert field.run(spec) == "transport"
    field.check_ended(spec.episode_id, Outcome.TRANSPORT, roles=BOTH[: BOTH.index(role) + 1])


@pytest.mark.parametrize("operation", ["info", "delete"])
def test_a_proxys_404_confirms_no_absence(field: Field, faults: ServiceFaults, operation: str) -> None:
    faults.set(**{f"page__{operation}": 1}, page_status=404)
    spec = solvable(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.hits() == {f"page.{operation}": 1}


@pytest.mark.parametrize("role", BOTH)
def test_a_command_whose_stream_is_cut_aborts(field: Field, faults: ServiceFaults, role: str) -> None:
    faults.set(stream_cut="always", only__role=role)
    spec = solvable(field)
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
    spec = solvable(field)
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
    spec = solvable(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)
    assert faults.hits()[fault.removesuffix("_seconds")] >= 2


def test_a_provider_that_deletes_nothing_for_two_seconds_costs_no_episode(field: Field, faults: ServiceFaults) -> None:
    faults.set(undeletable_seconds=2)
    spec = solvable(field)
    assert field.run(spec) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


@pytest.mark.parametrize("fault", ["undeletable_seconds", "delete_lag_seconds"])
def test_an_answered_deletion_is_no_absence_and_frees_no_permit(
    ground: Ground, faults: ServiceFaults, fault: str
) -> None:
    with open_field(ground, concurrency_limit=1) as field:
        faults.set(**{fault: 600})
        spec = solvable(field)
        assert field.run(spec) == "cleanup_unresolved"
        settled = field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, unresolved=True)
        assert [row.state for row in settled.allocations] == ["unresolved"]
        (left,) = field.running(spec.episode_id)
        assert left.sandbox_id in (settled.receipt.detail or "")

        other = solvable(field, admission_seconds=0.5)
        assert field.run(other) == "admission_timeout"
        assert list(reconciled(field).unresolved) == [settled.allocations[0].allocation_id]

        faults.clear()
        reconciled(field)
        field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED)
        assert field.run(solvable(field)) == "solved"


def test_a_deletion_that_is_never_answered_is_settled_later(
    field: Field, faults: ServiceFaults, hasty: tuple[E2BProvider, str]
) -> None:
    provider, url = hasty
    faults.set(hung__delete="always")
    spec = solvable(field)
    assert field.run(spec, provider=provider, terminus_url=url) == "cleanup_unresolved"
    field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, unresolved=True)
    faults.clear()
    reconciled(field)
    field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED)


def test_a_verifier_that_cannot_be_deleted_takes_the_score_away(field: Field, faults: ServiceFaults) -> None:
    faults.set(undeletable_seconds=600, only__role="verifier")
    spec = solvable(field)
    assert field.run(spec) == "cleanup_unresolved"
    settled = field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, roles=BOTH, unresolved=True)
    assert settled.receipt.reward is None
    faults.clear()
    reconciled(field)
    field.check_ended(spec.episode_id, Outcome.CLEANUP_UNRESOLVED, roles=BOTH)


# the list


class Unfiltered(E2BProvider):
    """Believes whatever the server lists."""

    def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
        return super().list({})


@pytest.mark.parametrize("kind", [E2BProvider, Unfiltered])
def test_a_list_that_ignores_its_filter_costs_no_other_sandbox_its_life(
    field: Field, faults: ServiceFaults, kind: type[E2BProvider]
) -> None:
    tag = field.farm.ledger.farm_tag()
    others: tuple[dict[str, str], ...] = (
        {},
        {"farm": f"{tag}-other"},
        {"role": "policy", "episode": "e-1", "allocation": "e-1-a1-policy"},
    )
    foreign = [field.provider.create(sandbox_request(metadata=metadata)).sandbox_id for metadata in others]
    faults.set(lost__create="always", only__farm=tag)
    spec = solvable(field)
    assert field.run(spec) == "transport"
    foreign += [field.provider.create(sandbox_request(metadata=metadata)).sandbox_id for metadata in others]
    faults.set(unavailable__create="always", list_unfiltered=True)  # the key settles nothing now: the list has to
    reconciled(field, kind(KEY, api_url=field.ground.sandboxes.url))
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
    specs = [solvable(field) for _ in range(8)]
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
