"""The concurrency limit in the provider's own log: many contend for few permits, and nobody else would stop them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from orchestrator.provider import CreateRequest
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import a_receipt, a_request, a_spec, farm_of, leased
from tests.support.faults import ServiceFaults
from tests.support.ground import KEY, Ground, open_settings
from workers.allocator import Allocator
from workers.sandboxes.provider import E2BProvider

pytest_plugins = ["tests.support.farm", "tests.support.faults"]

_LIMIT = 3
_SLOTS = 12
_EPISODES = 2
"""Of each slot, one after another."""


def test_the_provider_never_sees_more_sandboxes_than_the_limit(ground: Ground, faults: ServiceFaults) -> None:
    settings = open_settings(ground, concurrency_limit=_LIMIT)
    provider = E2BProvider(KEY, api_url=ground.sandboxes.url)

    def send(request: CreateRequest) -> tuple[str, None]:
        return provider.create(request).sandbox_id, None

    together = threading.Barrier(_SLOTS, timeout=20)

    def slot(number: int) -> None:
        with farm_of(settings) as farm:
            together.wait()
            for turn in range(_EPISODES):
                spec, lease = leased(farm, a_spec(f"e-limit-{number}-{turn}"), lease_seconds=600)
                farm.limiter.admit(spec.episode_id, reservation_id=None, wait_seconds=90, check=lambda: None)
                ours = Allocator(
                    spec.episode_id,
                    lease.token,
                    allocations=farm.ledger.allocations,
                    limiter=farm.limiter,
                    provider=provider,
                    check=lambda: None,
                    cleanup_seconds=60,
                )
                for role in (Role.POLICY, Role.VERIFIER):
                    request = a_request(spec, role)
                    owned, _ = ours.create(role, request, send, wait_seconds=90)
                    assert ours.dispose(owned)
                farm.ledger.commit(a_receipt(spec, Outcome.CANCELLED), lease.token)

    with ThreadPoolExecutor(_SLOTS) as slots:
        list(slots.map(slot, range(_SLOTS)))
    log = faults.creations()
    assert [row["status"] for row in log["attempts"]] == [201] * (2 * _EPISODES * _SLOTS)
    assert log["most_live"] == _LIMIT, "the limit holds, and nothing but the limit kept them back"
    assert log["live"] == 0
