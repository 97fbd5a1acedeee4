"""The provider as the reconciler calls it: under the same limits as the slots, and never in their way for long.

What always holds: a creation that is repeated goes through the line of those who create; every 429 is told to the
limiter; after one that answered another call nothing more is asked of the provider until its pause is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from orchestrator.errors import ConcurrencyLimited, EpisodeAborted, NothingSent, RateLimited
from orchestrator.limiter import Limiter
from orchestrator.provider import CreateRequest, Provider, SandboxRow
from orchestrator.records import Allocation

_LINE_SECONDS = 2.0
"""How long one creation waits in line; a leader that is silent for ten seconds is none any more."""

_NEXT_WAIT_SECONDS = 1.0
"""After a wait in vain the others only ask: one round does not wait for each."""

_LONGEST_PAUSE_SECONDS = 30.0
"""What waits for its deletion costs meanwhile, whatever Retry-After says."""

T = TypeVar("T")


class PacedProvider:
    """Makes one attempt a call; raises NothingSent when it is not the time for it, in words that stay the same.

    With `tells_limiter` False it keeps a 429 to itself, and creates nothing.
    """

    def __init__(
        self,
        provider: Provider,
        limiter: Limiter,
        *,
        tells_limiter: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provider = provider
        self._limiter = limiter
        self._tells_limiter = tells_limiter
        self._clock = clock
        self._paused_until = float("-inf")
        self._waits_from = float("-inf")

    def create(self, row: Allocation, request: CreateRequest) -> str:
        """Repeat the creation of an allocation that nobody else will repeat; the sandbox's id."""
        creation = self._limiter.creation(row.episode_id, row.role, settling=True)
        patience = _LINE_SECONDS if self._clock() >= self._waits_from else 0.0
        try:
            creation.wait(wait_seconds=patience, check=lambda: None)
        except EpisodeAborted:
            self._waits_from = self._clock() + _NEXT_WAIT_SECONDS
            raise NothingSent("its creation is repeated when its turn comes among those who create") from None
        try:
            return self._provider.create(request).sandbox_id
        except (RateLimited, ConcurrencyLimited) as error:
            creation.refused(error)
            raise

    def delete(self, sandbox_id: str) -> None:
        """Ask for deletion; not existing is success."""
        self._ask(lambda: self._provider.delete(sandbox_id))

    def describe(self, sandbox_id: str) -> SandboxRow | None:
        """The sandbox's row, or None when the provider says that it does not exist."""
        return self._ask(lambda: self._provider.describe(sandbox_id))

    def list(self, metadata: Mapping[str, str]) -> list[SandboxRow]:
        """Rows that carry all of `metadata`."""
        return self._ask(lambda: self._provider.list(metadata))

    def _ask(self, call: Callable[[], T]) -> T:
        if self._clock() < self._paused_until:
            raise NothingSent("the provider answered 429: it is asked again after a pause")
        try:
            return call()
        except (RateLimited, ConcurrencyLimited) as error:
            pause = self._limiter.note(error) if self._tells_limiter else _LONGEST_PAUSE_SECONDS
            self._paused_until = self._clock() + min(pause, _LONGEST_PAUSE_SECONDS)
            raise
