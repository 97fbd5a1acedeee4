"""What an episode asks of its sandboxes: their network, their lives, and the time that each call may take."""

from __future__ import annotations

from datetime import datetime

import httpx
import pytest

from orchestrator.errors import LeaseLost, OutcomeUnknown
from orchestrator.keys import Keys
from orchestrator.provider import CommandResult, CreateRequest, File, Sandbox
from orchestrator.vocabulary import Outcome, Role, allocation_id
from tests.support.bare_farm import a_receipt, leased
from tests.support.farm import Field
from tests.support.ground import BUDGETS, KEY
from tests.support.policies import candidate, repaired, script
from tests.support.waiting import wait_until
from workers.lease_keeper import LeaseKeeper
from workers.sandboxes.provider import E2BProvider
from workers.sandboxes.sandbox import E2BSandbox

pytest_plugins = ["tests.support.farm"]

BOTH = ("policy", "verifier")
LIVES = {"first_lifetime_seconds": 77, "policy_lifetime_seconds": 499, "verifier_lifetime_seconds": 66}


class NotedSandbox(E2BSandbox):
    """Notes the seconds that it is given."""

    noted: dict[str, set[float]]

    def write(self, path: str, data: bytes, *, timeout_seconds: float) -> None:
        self.noted.setdefault("transfer", set()).add(timeout_seconds)
        super().write(path, data, timeout_seconds=timeout_seconds)

    def read(self, path: str, *, limit_bytes: int, timeout_seconds: float) -> File:
        self.noted.setdefault("transfer", set()).add(timeout_seconds)
        return super().read(path, limit_bytes=limit_bytes, timeout_seconds=timeout_seconds)

    def run(
        self, command: str, *, timeout_seconds: float, output_limit_bytes: int, response_seconds: float
    ) -> CommandResult:
        self.noted["command"], self.noted["response"] = {timeout_seconds}, {response_seconds}
        return super().run(
            command,
            timeout_seconds=timeout_seconds,
            output_limit_bytes=output_limit_bytes,
            response_seconds=response_seconds,
        )


class NotingProvider(E2BProvider):
    """Its sandboxes note what they are given; the first `stubborn` deletions are not believed."""

    def __init__(self, api_url: str | None, *, stubborn: int = 0) -> None:
        super().__init__(KEY, api_url=api_url)
        self.noted: dict[str, set[float]] = {}
        self.stubborn = stubborn

    def _noted(self, made: Sandbox) -> Sandbox:
        assert isinstance(made, E2BSandbox)
        sandbox = NotedSandbox(made._e2b)
        sandbox.noted = self.noted
        return sandbox

    def create(self, request: CreateRequest) -> Sandbox:
        return self._noted(super().create(request))

    def attach(self, sandbox_id: str, *, lifetime_seconds: int) -> Sandbox:
        self.noted.setdefault("attach", set()).add(lifetime_seconds)
        return self._noted(super().attach(sandbox_id, lifetime_seconds=lifetime_seconds))

    def delete(self, sandbox_id: str) -> None:
        if self.stubborn:
            self.stubborn -= 1
            raise OutcomeUnknown("the answer was lost")
        super().delete(sandbox_id)


def requests_of(field: Field, episode_id: str) -> dict[Role, CreateRequest]:
    """The exact bodies that were sent, as their intents keep them."""
    found = {role: field.farm.ledger.allocations.request(allocation_id(episode_id, 1, role)) for role in Role}
    return {role: request for role, request in found.items() if request is not None}


@pytest.mark.parametrize("network", [True, False])
def test_a_verifier_is_offline_whatever_the_task_says_of_the_policy(field: Field, network: bool) -> None:
    spec = field.spec(script(candidate(repaired())))
    spec = spec.model_copy(update={"task": spec.task.model_copy(update={"network": network})})
    assert field.run(spec) == "solved"
    asked = requests_of(field, spec.episode_id)
    assert asked[Role.POLICY].allow_internet_access is network
    assert asked[Role.VERIFIER].allow_internet_access is False


def test_sandboxes_live_as_long_as_their_budgets_say(field: Field) -> None:
    provider = NotingProvider(field.settings.e2b_api_url)
    spec = field.spec(script(candidate(repaired())), budgets=BUDGETS.model_copy(update=LIVES))
    assert field.run(spec, provider=provider) == "solved"
    asked = requests_of(field, spec.episode_id)
    assert asked[Role.POLICY].lifetime_seconds == 77
    assert asked[Role.VERIFIER].lifetime_seconds == 66
    assert provider.noted["attach"] == {499}


def test_a_policy_sandbox_is_extended_at_the_provider(field: Field) -> None:
    started = field.remote(field.spec(budgets=BUDGETS.model_copy(update=LIVES)))
    started.episode.reset()
    sandbox_id = field.policy_sandbox(started.episode.episode_id)
    info = httpx.get(f"{field.settings.e2b_api_url}/sandboxes/{sandbox_id}", headers={"X-API-KEY": KEY}).json()
    began, ends = (datetime.fromisoformat(info[name]).timestamp() for name in ("startedAt", "endAt"))
    assert 499 <= ends - began < 520
    started.episode.close()
    started.end()


@pytest.mark.parametrize(("answer", "killed"), [(9, 2), (40, 30)])
def test_transfers_and_the_verifiers_command_are_given_their_budgets(
    field: Field, answer: float, killed: float
) -> None:
    provider = NotingProvider(field.settings.e2b_api_url)
    own = {"transfer_seconds": 7, "command_seconds": 2, "verifier_command_seconds": answer, "deadline_seconds": 60}
    budgets = BUDGETS.model_copy(update=own)
    spec = field.spec(script(candidate(repaired())), budgets=budgets)
    assert field.run(spec, provider=provider) == "solved"
    assert provider.noted["transfer"] == {7}
    assert (provider.noted["command"], provider.noted["response"]) == ({killed}, {answer})


def test_a_reserved_episode_waits_for_its_permit_as_long_as_its_batch_may(field: Field) -> None:
    field.farm.redis.hset(Keys.LIMITS, "concurrency", 1)
    field.farm.redis.zadd(Keys.PERMITS, {"e-other": 1})
    budgets = BUDGETS.model_copy(update={"reserved_admission_seconds": 0.4, "admission_seconds": 30})
    spec = field.spec(script(), budgets=budgets, reservation_id="reservation-gone")
    assert field.run(spec) == "admission_timeout"
    field.check_ended(spec.episode_id, Outcome.ADMISSION_TIMEOUT, roles=())


def test_a_deletion_is_tried_again_three_times_before_it_is_unresolved(field: Field) -> None:
    spec = field.spec(script(candidate(repaired())))
    assert field.run(spec, provider=NotingProvider(field.settings.e2b_api_url, stubborn=3)) == "solved"
    field.check_ended(spec.episode_id, Outcome.SOLVED, roles=BOTH)


def test_a_lease_is_not_kept_past_the_budget_of_its_phase(field: Field) -> None:
    spec, lease = leased(field.farm)
    with LeaseKeeper(field.farm.ledger, lease, renew_seconds=0.05, lost_seconds=10) as keeper:
        keeper.allow(0.2)
        keeper.check()

        def lost() -> bool:
            try:
                keeper.check()
            except LeaseLost:
                return True
            return False

        wait_until(lost, description="its phase is over", seconds=5)
    field.farm.ledger.commit(a_receipt(spec, Outcome.CANCELLED), lease.token)
