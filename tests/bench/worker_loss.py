"""How long it takes until everything of a worker that was killed with -9 is settled, with the default settings.

From the kill of a worker with two episodes to the last of their receipts with every sandbox confirmed absent: a lease
has to run out, a round of the reconciler has to see it. Another worker goes on, the killed one is replaced. Three kinds
of rounds: with live policy sandboxes, with running verifiers, and while the service holds the creations. In the last,
what becomes of a creation is unknown to everybody until the service has answered; those are reported apart.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from deploy.commands.resolve import is_running
from deploy.local_farm import LocalFarm
from orchestrator.episodes import Episode
from orchestrator.farm import open_farm
from orchestrator.pool import Pool
from orchestrator.records import Allocation, Script, SettledReceipt
from orchestrator.settings import Settings
from orchestrator.tasks import load_builtin
from orchestrator.vocabulary import AllocationState, Outcome, Role
from tests.bench.rows import Goal, Row, spread
from tests.bench.stand import farm_of
from tests.support.policies import candidate
from tests.support.waiting import wait_until

_ROUNDS = 3
_VERIFIER_ROUNDS = 1
_UNKNOWN_ROUNDS = 2
_WORKERS = 2
_SLOTS = 2
"""Of each worker."""
_HELD_SECONDS = 3.0
_WAIT_SECONDS = 60.0
_VERIFIER_SECONDS = 15
"""A candidate's sleep: its verifier runs for so long, within the budget of its command."""


@dataclass
class Losses:
    """Seconds from a kill until each lost episode was settled; `unknown`: of those whose creation was in flight."""

    named: list[float] = field(default_factory=list)
    unknown: list[float] = field(default_factory=list)


def worker_loss(
    *,
    rounds: int = _ROUNDS,
    verifier_rounds: int = _VERIFIER_ROUNDS,
    unknown_rounds: int = _UNKNOWN_ROUNDS,
    held_seconds: float = _HELD_SECONDS,
    **settings: object,
) -> list[Row]:
    """Rows of the slowest episodes; `settings` are the farm's, the defaults without."""
    live, verifying, held = Losses(), Losses(), Losses()
    with farm_of(_WORKERS, **settings) as farm, Pool(farm.settings) as pool:
        for _ in range(rounds):
            _lose(pool, _live, live)
        for _ in range(verifier_rounds):
            _lose(pool, _verifying, verifying)
        with _held_creations(farm, held_seconds):
            for _ in range(unknown_rounds):
                _lose(pool, _creating, held)
        lease, every = farm.settings.lease_lost_seconds, farm.settings.reconcile_seconds
    how = f"lease {lease:g} s, a round every {every:g} s"
    named = [*live.named, *verifying.named, *held.named]
    return [
        Row("a worker killed with -9 is settled within", max(named), "s", Goal("<=", 20), f"{spread(named)}; {how}"),
        *_part("of it: with a running verifier", verifying.named, how),
        *_part(
            "the same, creations in flight whose outcome is unknown",
            held.unknown,
            f"the service holds each creation for {held_seconds:g} s; {how}",
        ),
    ]


def _part(name: str, seconds: Sequence[float], how: str) -> list[Row]:
    return [Row(name, max(seconds), "s", None, f"{spread(seconds)}; {how}")] if seconds else []


def _lose(pool: Pool, begin: Callable[[Pool], list[Episode]], losses: Losses) -> None:
    """Fill all workers, kill one; note how long each of its episodes took until it was settled."""
    wait_until(
        lambda: pool.capacity().free == _WORKERS * _SLOTS, description="every slot is free", seconds=_WAIT_SECONDS
    )
    episodes = begin(pool)
    rows = open_farm(pool.settings).presence.workers()
    victim = next(row for row in rows if is_running(row.pid))  # a killed one is listed for a while
    os.kill(victim.pid, signal.SIGKILL)
    began = time.monotonic()
    unknown = {episode.episode_id for episode in episodes if not _all_named(pool, episode)}
    done: dict[str, float] = {}

    def settled() -> bool:
        for episode in episodes:
            found = pool.ledger.receipt(episode.episode_id)
            if found is not None and episode.episode_id not in done and _lost(found):
                done[episode.episode_id] = time.monotonic() - began
        return len(done) == _SLOTS

    wait_until(settled, description=f"the episodes of {victim.worker_id} are settled", seconds=_WAIT_SECONDS)
    for episode in episodes:
        episode.cancel()
    wait_until(
        lambda: all(pool.ledger.receipt(one.episode_id) for one in episodes),
        description="the others have ended",
        seconds=_WAIT_SECONDS,
    )
    for name, seconds in done.items():
        (losses.unknown if name in unknown else losses.named).append(seconds)


def _live(pool: Pool) -> list[Episode]:
    """Every slot has a policy sandbox."""
    episodes = [pool.submit(load_builtin("weekly-sales")) for _ in range(_WORKERS * _SLOTS)]
    for episode in episodes:
        episode.reset()
    return episodes


def _verifying(pool: Pool) -> list[Episode]:
    """Every slot has a verifier that runs its candidate."""
    script = Script(commands=(candidate(f"import time\ntime.sleep({_VERIFIER_SECONDS})\n"),))
    episodes = [pool.submit(load_builtin("weekly-sales"), policy=script) for _ in range(_WORKERS * _SLOTS)]
    _await_rows(pool, episodes, Role.VERIFIER, AllocationState.CREATED)
    return episodes


def _creating(pool: Pool) -> list[Episode]:
    """Every slot waits for the answer to its creation."""
    seen = _held(pool.settings)
    script = Script(commands=("true",))
    episodes = [pool.submit(load_builtin("weekly-sales"), policy=script) for _ in range(_WORKERS * _SLOTS)]
    _await_rows(pool, episodes, Role.POLICY, AllocationState.INTENDED)
    wait_until(
        lambda: _held(pool.settings) >= seen + len(episodes),
        description="the service holds their creations",
        seconds=_WAIT_SECONDS,
    )
    return episodes


@contextmanager
def _held_creations(farm: LocalFarm, seconds: float) -> Iterator[None]:
    """Let the service hold each creation for so long."""
    _faults(farm.settings, "PUT", {"latency": {"create": f"constant:{seconds}"}})
    try:
        yield
    finally:
        _faults(farm.settings, "DELETE", {})


def _held(settings: Settings) -> int:
    """How many creations the service has begun to hold."""
    return int(_faults(settings, "GET", {})["hits"].get("latency.create", 0))


def _faults(settings: Settings, method: str, body: dict[str, Any]) -> dict[str, Any]:
    assert settings.e2b_api_key is not None
    headers = {"X-API-KEY": settings.e2b_api_key.get_secret_value()}
    answer = httpx.request(method, f"{settings.e2b_api_url}/admin/faults", json=body, headers=headers, timeout=10)
    shown: dict[str, Any] = answer.raise_for_status().json()
    return shown


def _await_rows(pool: Pool, episodes: Sequence[Episode], role: Role, state: AllocationState) -> None:
    def there() -> bool:
        rows = [_rows(pool, episode) for episode in episodes]
        return all(any((row.role, row.state) == (role, state) for row in found) for found in rows)

    wait_until(there, description=f"every slot has a {role} sandbox that is {state}", seconds=_WAIT_SECONDS)


def _rows(pool: Pool, episode: Episode) -> list[Allocation]:
    names = pool.ledger.allocation_ids(episode.episode_id)
    return [row for row in pool.ledger.allocations.each(names) if row is not None]


def _all_named(pool: Pool, episode: Episode) -> bool:
    return all(row.sandbox_id is not None for row in _rows(pool, episode))


def _lost(found: SettledReceipt) -> bool:
    """Whether it is the receipt of a lost episode with everything settled; the other worker's end otherwise."""
    return found.receipt.outcome is Outcome.WORKER_LOST and all(row.state.settled for row in found.allocations)
