"""A worker's share of creations, and nothing in a sandbox: `python -m ... MODE API REDIS RATE LIMIT SECONDS`.

Two slots, as a worker has. Mode `farm`: row, lease, permit, a policy sandbox and then a verifier through the worker's
own allocator and provider, receipt. Mode `sdk`: the same two sandboxes with the SDK alone, its retries as they come. It
says `ready`, begins when it reads a line and ends by itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import e2b

from orchestrator.errors import EpisodeAborted
from orchestrator.vocabulary import Outcome, Role
from tests.support.bare_farm import a_receipt, a_request, a_spec, farm_of, farm_settings, leased
from workers.allocator import Allocator
from workers.sandboxes.provider import E2BProvider

_KEY = "e2b_" + "0" * 40
_LIFE_SECONDS = 0.2
"""How long each sandbox is used: sixteen slots keep asking for several times the ceiling."""


def farm_slot(name: str, api_url: str, redis_url: str, rate: float, limit: int, ends: float) -> None:
    """Episodes of two sandboxes until the time is over."""
    provider = E2BProvider(_KEY, api_url=api_url)
    with farm_of(farm_settings(redis_url, creation_rate=rate, concurrency_limit=limit)) as farm:
        number = 0
        while time.monotonic() < ends:
            number += 1
            spec, lease = leased(farm, a_spec(f"e-{name}-{number}"), lease_seconds=600)
            farm.limiter.admit(spec.episode_id, reservation_id=None, wait_seconds=60, check=lambda: None)
            allocator = Allocator(
                spec.episode_id,
                lease.token,
                allocations=farm.ledger.allocations,
                limiter=farm.limiter,
                provider=provider,
                check=lambda: None,
                cleanup_seconds=60,
            )
            try:
                for role in (Role.POLICY, Role.VERIFIER):
                    owned, _ = allocator.create(
                        role,
                        a_request(spec, role),
                        lambda body: (provider.create(body).sandbox_id, None),
                        wait_seconds=ends - time.monotonic(),
                    )
                    time.sleep(_LIFE_SECONDS)
                    allocator.dispose(owned)
            except EpisodeAborted:
                allocator.dispose_all()
            farm.ledger.commit(a_receipt(spec, Outcome.CANCELLED), lease.token)


def sdk_slot(api_url: str, ends: float) -> None:
    """Sandboxes with the SDK alone; one that was refused for good is asked for anew, since the work has to be done."""
    sandboxes = e2b.E2B(api_key=_KEY, api_url=api_url, sandbox_url=api_url, debug=False).Sandbox
    while time.monotonic() < ends:
        try:
            made = sandboxes.create(timeout=60)
        except e2b.RateLimitException:
            continue
        time.sleep(_LIFE_SECONDS)
        made.kill()


def main() -> None:
    """Two slots on threads."""
    mode, api_url, redis_url, rate, limit, seconds = sys.argv[1:]
    if mode == "farm":
        E2BProvider(_KEY, api_url=api_url).prepare()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    ends = time.monotonic() + float(seconds)
    given = (api_url, redis_url, float(rate), int(limit), ends)
    slots = [
        threading.Thread(target=farm_slot, args=(f"{os.getpid()}-{number}", *given))
        if mode == "farm"
        else threading.Thread(target=sdk_slot, args=(api_url, ends))
        for number in range(2)
    ]
    for slot in slots:
        slot.start()
    for slot in slots:
        slot.join()


if __name__ == "__main__":
    main()
