"""A reconciler's scene: real rows, a provider that misbehaves on request, and a clock that can be put forward.

A test module that needs it says `pytest_plugins = ["tests.support.scene"]` and takes the fixture `scene`.
PYTEST_DONT_REWRITE: those modules import this one before pytest learns that it is a plugin.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.ledger import Ledger
from orchestrator.limiter import Admission
from orchestrator.provider import Provider
from orchestrator.reconciler import Reconciler, Report
from orchestrator.records import EpisodeSpec, Receipt
from orchestrator.rows import Lease
from orchestrator.vocabulary import AllocationState, Role, allocation_id
from tests.support.bare_farm import a_request, admit, expire, intended, leased, opened_farm, stored
from tests.support.fake_provider import FakeProvider
from tests.support.reconcilers import LEASE_SECONDS, reconciler_of


class LaterLedger(Ledger):
    """A ledger whose clock is ahead by `ahead` seconds: how tests let time pass."""

    ahead = 0.0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, clock_ms=lambda: int(self.now() * 1000), **options)

    def now(self) -> float:
        """Redis's time, later."""
        return super().now() + self.ahead


@dataclass
class Scene:
    """A farm, a provider, and a reconciler that has looked at them for longer than a lease."""

    farm: Farm
    provider: FakeProvider
    ledger: LaterLedger
    passed: float = 0.0
    watchers: list[Reconciler] = field(default_factory=list)

    @property
    def reconciler(self) -> Reconciler:
        """The one that makes `round`s."""
        return self.watchers[0]

    def watcher(self, name: str, provider: Provider | None = None, **options: Any) -> Reconciler:
        """One more reconciler of this scene, on its clocks."""
        options.setdefault("ledger", self.ledger)
        self.watchers.append(reconciler_of(self.farm, provider or self.provider, name, clock=self._clock, **options))
        return self.watchers[-1]

    def _clock(self) -> float:
        return time.monotonic() + self.passed

    def pass_time(self, seconds: float) -> None:
        """Let time pass, every reconciler looking on all along, whatever the test itself took before."""
        for watcher in self.watchers:
            watcher.beat()
        while seconds > 0:
            step = min(seconds, LEASE_SECONDS / 4)
            self.hang(step)
            for watcher in self.watchers:
                watcher.beat()
            seconds -= step

    def hang(self, seconds: float) -> None:
        """Let time pass in which nobody sees Redis."""
        self.passed += seconds
        self.step_clock(seconds)

    def step_clock(self, seconds: float) -> None:
        """Set Redis's clock forward or back: no time passes."""
        self.ledger.ahead += seconds

    def round(self) -> Report:
        """One round."""
        return self.reconciler.run_once()

    def started(self, *, role: Role = Role.POLICY) -> tuple[EpisodeSpec, Lease, str]:
        """A running episode with its permit and one sandbox; the sandbox's id."""
        spec, lease = leased(self.farm)
        assert admit(self.farm, spec.episode_id) is Admission.GRANTED
        row = intended(self.farm, spec, lease, role)
        sandbox_id = self.provider.create(a_request(spec, role)).sandbox_id
        self.farm.ledger.allocations.created(row, sandbox_id, lease.token, creating_ms=10)
        return spec, lease, sandbox_id

    def kill(self, spec: EpisodeSpec) -> None:
        """Let the episode's slot have died one lease time ago."""
        expire(self.farm.redis, spec.episode_id)

    def receipt(self, spec: EpisodeSpec) -> Receipt:
        """Its one receipt."""
        settled = self.farm.ledger.receipt(spec.episode_id)
        assert settled is not None, "no receipt"
        return settled.receipt

    def state(self, spec: EpisodeSpec, role: Role = Role.POLICY) -> AllocationState:
        """Where its sandbox stands."""
        return stored(self.farm, allocation_id(spec.episode_id, 1, role)).state

    @property
    def permits(self) -> int:
        """How many are held."""
        return int(self.farm.redis.zcard(Keys.PERMITS))


@pytest.fixture
def scene(redis_url: str) -> Iterator[Scene]:
    with opened_farm(redis_url, concurrency_limit=5) as farm:
        provider = FakeProvider(started_at=farm.ledger.now())
        ledger = LaterLedger(
            farm.redis, farm.ledger.allocations, retention_seconds=farm.settings.receipt_retention_seconds
        )
        opened = Scene(farm, provider, ledger)
        opened.watcher("reconciler-test")
        opened.pass_time(LEASE_SECONDS)
        yield opened
