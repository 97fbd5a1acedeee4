"""Reconcilers of a farm under test."""

from __future__ import annotations

from typing import Any

from orchestrator.farm import Farm
from orchestrator.ledger import Ledger
from orchestrator.provider import Provider
from orchestrator.reconciler import Reconciler

LEASE_SECONDS = 12.0


def reconciler_of(
    farm: Farm,
    provider: Provider,
    name: str = "reconciler-test",
    *,
    ledger: Ledger | None = None,
    lease_seconds: float = LEASE_SECONDS,
    **options: Any,
) -> Reconciler:
    """One over the farm's own parts; `ledger` takes the place of the farm's, `options` are Reconciler's others."""
    return Reconciler(
        name,
        ledger=ledger or farm.ledger,
        presence=farm.presence,
        queue=farm.queue,
        limiter=farm.limiter,
        provider=provider,
        lease_seconds=lease_seconds,
        **options,
    )
