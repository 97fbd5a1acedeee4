"""Faults in the session's sandbox service: set for one test, gone after it; episodes that meet them, and a reconciler.

A test module that needs them says `pytest_plugins = ["tests.support.farm", "tests.support.faults"]` and takes the
fixture `faults`. PYTEST_DONT_REWRITE: those modules import this one before pytest learns that it is a plugin.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from orchestrator.reconciler import Report
from orchestrator.records import EpisodeSpec
from tests.support.farm import Field
from tests.support.ground import BUDGETS, KEY, Ground
from tests.support.policies import candidate, repaired, script
from tests.support.reconcilers import reconciler_of
from tests.support.terminus import serving
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider

BOTH = ("policy", "verifier")


@dataclass
class ServiceFaults:
    """The admin routes of a running service; knows since when its test has run."""

    url: str
    key: str = KEY
    began: float = dataclasses.field(default_factory=time.time)

    def set(self, **faults: Any) -> None:
        """Let these take the place of all others; a dot in a name is written as two underscores."""
        body: dict[str, Any] = {}
        for name, value in faults.items():
            group, _, member = name.partition("__")
            if member:
                body.setdefault(group, {})[member] = value
            else:
                body[group] = value
        self.call("PUT", "faults", json=body).raise_for_status()

    def clear(self) -> None:
        """No more faults; waits for the end of an outage."""

        def cleared() -> bool:
            try:
                return self.call("DELETE", "faults").is_success
            except httpx.TransportError:
                return False

        wait_until(cleared, description="the service takes orders", seconds=20)

    def hits(self) -> dict[str, int]:
        """How often each fault has struck since it was set."""
        counts: dict[str, int] = self.call("GET", "faults").raise_for_status().json()["hits"]
        return counts

    def wait_hits(self, name: str) -> None:
        """Wait until a fault has struck."""
        wait_until(lambda: self.hits().get(name), description=f"{name} strikes")

    def creations(self) -> dict[str, Any]:
        """The provider's log of creation attempts since the test began."""
        log: dict[str, Any] = self.call("GET", "creations", params={"since": self.began}).raise_for_status().json()
        return log

    def statuses(self, key: str) -> list[int | None]:
        """What each attempt under one key, or under a key that begins so, was answered."""
        return [row["status"] for row in self.creations()["attempts"] if (row["key"] or "").startswith(key)]

    def call(self, method: str, what: str, **options: Any) -> httpx.Response:
        """One request to an admin route."""
        headers = {"X-API-KEY": self.key}
        return httpx.request(method, f"{self.url}/admin/{what}", headers=headers, timeout=10, **options)


@pytest.fixture
def faults(ground: Ground) -> Iterator[ServiceFaults]:
    """The service's faults; whatever a test set is cleared after it."""
    service = ServiceFaults(ground.sandboxes.url)
    yield service
    service.clear()


@pytest.fixture(scope="module")
def hasty(ground: Ground) -> Iterator[tuple[E2BProvider, str]]:
    """A provider that waits one second for an answer, and the URL of a Terminus server that has one too."""
    provider = E2BProvider(KEY, api_url=ground.sandboxes.url, request_seconds=1)
    with serving(provider, BUDGETS) as url:
        yield provider, url


def solvable(field: Field, **budgets: Any) -> EpisodeSpec:
    """An episode that is solved unless something breaks."""
    return field.spec(script(candidate(repaired())), budgets=BUDGETS.model_copy(update=budgets))


def reconciled(field: Field, provider: E2BProvider | None = None) -> Report:
    """One round of the reconciler."""
    return reconciler_of(field.farm, provider or field.provider).run_once()
