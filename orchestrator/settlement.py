"""Settling one sandbox of somebody who is gone: deleted, confirmed absent and priced, or the reason why not yet.

What always holds: only what the ledger names, or what carries our farm's tag on its own row, is ever deleted; what may
still run stays unsettled, and keeps its permit, until its absence is confirmed or its longest life is over.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from orchestrator.allocations import RECONCILER_TOKEN
from orchestrator.errors import FarmError, OutcomeUnknown, ProviderError
from orchestrator.ledger import Ledger
from orchestrator.pacing import PacedProvider
from orchestrator.plan import DeleteOrphan, is_orphan
from orchestrator.provider import CreateRequest, delete_confirmed
from orchestrator.records import Allocation
from orchestrator.unresolved import Kind
from orchestrator.vocabulary import AllocationState

logger = logging.getLogger(__name__)


_LONGEST_LIFE_SECONDS = 86_400
"""What no budget can exceed: for a row that does not say how long its sandbox can live."""


class Settlement:
    """Settles allocations under a token, and deletes orphans."""

    def __init__(self, ledger: Ledger, provider: PacedProvider, *, create_answer_seconds: float) -> None:
        self._ledger = ledger
        self._provider = provider
        self._create_answer_seconds = create_answer_seconds

    def settle(self, row: Allocation, token: str) -> str | None:
        """Delete and confirm one sandbox; the reason why it cannot be settled yet, or None when it is."""
        try:
            named = row if row.sandbox_id is not None else self._name_unknown(row, token)
            if named is not None and named.sandbox_id is not None:
                self._delete(named, named.sandbox_id, token)
        except FarmError as error:
            return str(error)
        current = self._ledger.allocations.get(row.allocation_id)
        settled = current is not None and current.state.settled
        return None if settled else "its creation cannot be settled yet"

    def delete_orphan(self, action: DeleteOrphan) -> bool:
        """Delete a sandbox of ours that belongs to nobody, after looking at its tag and its allocation once more.

        False when it has gone by itself or is no orphan after all. Raises what stands in the way; it stays listed.
        """
        unresolved, sandbox_id = self._ledger.unresolved, action.sandbox_id
        seen = self._provider.describe(sandbox_id)
        allocation = self._ledger.allocations.get(seen.metadata.get("allocation", "")) if seen else None
        begun = sandbox_id in unresolved.orphans()
        if seen is None:
            if begun:
                unresolved.strike_deleted_orphan(sandbox_id)
            return begun
        if not is_orphan(seen, self._ledger.known_farm_tag(), allocation):
            unresolved.strike(Kind.SANDBOX, sandbox_id)
            return False
        self._keep(action, "its deletion was begun")
        try:
            delete_confirmed(self._provider, sandbox_id)
        except ProviderError as error:
            self._keep(action, str(error))
            raise
        unresolved.strike_deleted_orphan(sandbox_id)
        return True

    def _keep(self, action: DeleteOrphan, reason: str) -> None:
        self._ledger.unresolved.keep(
            Kind.SANDBOX, action.sandbox_id, reason, now=self._ledger.now(), allocation_id=action.allocation_id
        )

    def _delete(self, row: Allocation, sandbox_id: str, token: str) -> None:
        """Delete, confirm, price at what the provider says of its size; raises what stood in the way."""
        allocations = self._ledger.allocations
        try:
            seen = self._provider.describe(sandbox_id) if row.vcpus is None else None
            if seen is not None:
                row = allocations.sized(row, vcpus=seen.vcpus, memory_mb=seen.memory_mb).row
            delete_confirmed(self._provider, sandbox_id)
        except ProviderError as error:
            if row.state is AllocationState.CREATED:
                allocations.unresolved(row, token, str(error))
            elif self._outlived(row, sandbox_id, token, error):
                return
            raise
        began = row.created_at or row.intended_at
        allocations.absent(row, token, running_ms=max(0, int((self._ledger.now() - began) * 1000)))

    def _outlived(self, row: Allocation, sandbox_id: str, token: str, error: ProviderError) -> bool:
        """Close an unresolved sandbox whose longest life is over, unless the provider says that it is still there."""
        over_at = self._life_over_at(row)
        if over_at is None or self._ledger.now() <= over_at:
            return False
        with suppress(ProviderError):
            if self._provider.describe(sandbox_id) is not None:
                return False
        lived = over_at - (row.created_at or row.intended_at)
        detail = f"never confirmed absent; its longest life is over ({error})"
        self._ledger.allocations.expired(row, token, detail, running_ms=int(lived * 1000))
        return True

    def _life_over_at(self, row: Allocation) -> float | None:
        """Until when an unresolved sandbox can live at most; None while nobody has been refused its deletion yet.

        It counts from the first refused deletion: only whoever owned it before could have extended its life.
        """
        if row.unresolved_at is None:
            return None
        return row.unresolved_at + self._create_answer_seconds + (row.longest_seconds or _LONGEST_LIFE_SECONDS)

    def _name_unknown(self, row: Allocation, token: str) -> Allocation | None:
        """Name the sandbox of a creation whose answer was lost: repeat the stored create under its own key.

        The row as it stands then, or None. What is never named was never extended: it lives its request's lifetime.
        """
        allocations = self._ledger.allocations
        request = allocations.request(row.allocation_id)
        if request is None:
            raise FarmError(f"{row.allocation_id}: its create request is missing")
        try:
            sandbox_id = self._provider.create(row, request)
        except ProviderError as error:
            logger.info("creation not repeated", extra={"allocation": row.allocation_id, "error": str(error)})
            found = self._find(request)
            if found is None:
                life = self._create_answer_seconds + request.lifetime_seconds
                if row.unknown_at is None or token != RECONCILER_TOKEN or isinstance(error, OutcomeUnknown):
                    # it may have been sent until just now, by its owner or by ourselves
                    allocations.unknown(row, token, str(error))
                elif self._ledger.now() > row.unknown_at + life:
                    allocations.expired(row, token, f"never named; its longest life is over ({error})")
                return None
            sandbox_id = found
        return self._note_named(row, request, sandbox_id, token)

    def _note_named(self, row: Allocation, request: CreateRequest, sandbox_id: str, token: str) -> Allocation | None:
        """Note its name, its size, and since when the provider says that it has run; its intent when that is away."""
        allocations = self._ledger.allocations
        now, began, seen = self._ledger.now(), row.intended_at, None
        with suppress(ProviderError):
            seen = self._provider.describe(sandbox_id)
            # gone by itself: nobody knows since when, and a cap holds only with the most that it can have cost
            began = max(began, now - request.lifetime_seconds if seen is None else seen.started_at)
        allocations.created(row, sandbox_id, token, creating_ms=max(0, int((now - began) * 1000)))
        named = allocations.get(row.allocation_id)
        if named is None or seen is None:
            return named
        return allocations.sized(named, vcpus=seen.vcpus, memory_mb=seen.memory_mb).row

    def _find(self, request: CreateRequest) -> str | None:
        """The sandbox that carries the allocation's own tags; that there is none proves nothing."""
        wanted = {"allocation": request.allocation_id, "farm": request.metadata.get("farm", "")}
        try:
            rows = self._provider.list(wanted)
        except ProviderError as error:
            logger.info("not listed", extra={"allocation": request.allocation_id, "error": str(error)})
            return None
        return next((row.sandbox_id for row in rows if wanted.items() <= row.metadata.items()), None)
