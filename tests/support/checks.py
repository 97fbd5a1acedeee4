"""What can be seen of a farm from outside, and what must be so after any end of an episode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from orchestrator.farm import Farm
from orchestrator.keys import Keys
from orchestrator.provider import SandboxRow
from orchestrator.records import SettledReceipt
from orchestrator.settings import Settings
from orchestrator.vocabulary import Outcome
from tests.support.ground import KEY
from tests.support.redis_server import announced, check_leaks
from tests.support.waiting import wait_until
from workers.sandboxes.provider import E2BProvider


@dataclass
class Checks:
    """A farm and its provider, looked at."""

    settings: Settings
    farm: Farm
    provider: E2BProvider

    def events(self, episode_id: str) -> list[dict[str, Any]]:
        """What the provider itself logged of an episode's sandboxes, oldest first."""
        answer = httpx.get(f"{self.settings.e2b_api_url}/admin/events", headers={"X-API-KEY": KEY}, timeout=10)
        rows: list[dict[str, Any]] = answer.raise_for_status().json()
        return [row for row in rows if row["metadata"].get("episode") == episode_id]

    def running(self, episode_id: str) -> list[SandboxRow]:
        """Sandboxes of an episode in the provider's own list."""
        return self.provider.list({"episode": episode_id})

    def receipt(self, episode_id: str) -> SettledReceipt:
        """The episode's receipt; fails when it has none."""
        settled = self.farm.ledger.receipt(episode_id)
        assert settled is not None, "no receipt"
        return settled

    def wait_receipt(self, episode_id: str, seconds: float = 20) -> SettledReceipt:
        """Wait for the receipt."""
        wait_until(
            lambda: self.farm.ledger.receipt(episode_id), description=f"receipt of {episode_id}", seconds=seconds
        )
        return self.receipt(episode_id)

    def policy_sandbox(self, episode_id: str) -> str:
        """The id of the episode's running policy sandbox, once there is one."""
        wait_until(lambda: self.running(episode_id), description="a policy sandbox")
        return self.running(episode_id)[0].sandbox_id

    def check_ended(
        self, episode_id: str, outcome: Outcome, *, roles: Sequence[str] = ("policy",), unresolved: bool = False
    ) -> SettledReceipt:
        """Check all that must be so after any end: one receipt, its reward, nothing running, nothing held."""
        settled = self.receipt(episode_id)
        receipt, redis = settled.receipt, self.farm.redis
        assert receipt.outcome is outcome, f"{receipt.outcome}: {receipt.detail}"
        assert receipt.reward == outcome.score
        assert (receipt.reward is None) is (not outcome.scored)
        assert announced(redis, receipt.run_id).count(episode_id) == 1
        assert redis.zscore(Keys.RECEIPTS, episode_id) is not None
        assert self.farm.ledger.row(episode_id).state == "final"  # type: ignore[union-attr]
        for place in (Keys.OPEN, Keys.LEASES, Keys.WAITERS, Keys.WAITERS_SEEN, Keys.STEPPED_BACK):
            assert redis.zscore(place, episode_id) is None, place
        created = [row for row in self.events(episode_id) if row["event"] == "created"]
        assert [row["metadata"]["role"] for row in created] == list(roles)
        if not unresolved:
            assert redis.zscore(Keys.PERMITS, episode_id) is None
            assert self.running(episode_id) == []
            self.check_absent(episode_id, settled)
            check_leaks(redis)
        return settled

    def check_absent(self, episode_id: str, settled: SettledReceipt) -> None:
        """Every sandbox ended by the provider's own log, each policy before any verifier began, all before a score."""
        events = self.events(episode_id)
        ends = {row["sandbox_id"]: n for n, row in enumerate(events) if row["event"] != "created"}
        begins = {row["sandbox_id"]: n for n, row in enumerate(events) if row["event"] == "created"}
        assert ends.keys() == begins.keys()
        role = {row["sandbox_id"]: row["metadata"]["role"] for row in events}
        for policy, verifier in itertools.product(begins, begins):
            if (role[policy], role[verifier]) == ("policy", "verifier"):
                assert ends[policy] < begins[verifier], "the policy sandbox was there when the verifier was created"
        named = {row.sandbox_id for row in settled.allocations if row.sandbox_id is not None}
        assert named == begins.keys()
        absent = [row.absent_at for row in settled.allocations if row.sandbox_id is not None]
        assert all(at is not None for at in absent)
        if settled.receipt.outcome.scored:
            assert all(at <= settled.receipt.finished_at for at in absent if at is not None)
