"""Bringing one sandbox into being and out of it again, so that whatever happens its id or its intent is on record.

What always holds: the intent is written before anything is sent; one creation is sent under one key; a 429 is told to
the limiter and waited out; a lost answer is asked again under the same key and otherwise left `unknown`; deletion is
believed only when the provider says that the sandbox does not exist.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from redis.exceptions import RedisError

from orchestrator.allocations import Allocations
from orchestrator.errors import (
    ConcurrencyLimited,
    EpisodeAborted,
    NothingSent,
    OutcomeUnknown,
    ProviderError,
    RateLimited,
)
from orchestrator.limiter import Limiter
from orchestrator.provider import CreateRequest, Provider, delete_confirmed
from orchestrator.records import Allocation
from orchestrator.retries import retrying
from orchestrator.vocabulary import AllocationState, Outcome, Role

logger = logging.getLogger(__name__)

_CREATE_ATTEMPTS = 30
"""429s and refused connections waited out per sandbox before its episode ends with the cause."""

_REFUSED_SECONDS = 35.0
"""How long refused connections, and a Terminus server at capacity, are waited out."""

_ASK_AGAIN = 2
"""How often a lost answer is asked for under the same key before the reconciler has to settle it."""

_LOOK_ATTEMPTS = 3
"""How often a sandbox's size is asked for: without it no budget holds, so that it is worth the wait."""

_DELETE_ATTEMPTS = 4
"""Delete and confirm: once, and three times again."""

_CONFIRM_WAIT_SECONDS = 0.5
"""Doubled each time: a provider that fails for two seconds costs no episode."""

_REFUSED_CALLS_SECONDS = 15.0
"""How long 429s to a call that creates nothing are waited out; those to a deletion for as long as it may take."""

_REFUSED_CALL_SECONDS = 5.0
"""The longest wait before such a call is made again: the sandbox lives and costs meanwhile."""

_SHORTEST_PAUSE_SECONDS = 0.05
"""The shortest one: the pause that everybody shares may be over already."""

_UNSHARED_PAUSE_SECONDS = 1.0
"""Such a wait when Redis is away, so that nobody can say how long everybody pauses."""

T = TypeVar("T")


@dataclass
class Owned:
    """A sandbox that this episode created and has to get rid of."""

    row: Allocation
    sandbox_id: str
    created: float
    """Monotonic time since which it may have run: when its creation was first sent and not refused."""
    absent: bool = False
    affordable: bool = True
    """False when its real size is more than a budget can bear."""


class Allocator:
    """Creates and disposes of one episode's sandboxes under its lease's token."""

    def __init__(
        self,
        episode_id: str,
        token: str,
        *,
        allocations: Allocations,
        limiter: Limiter,
        provider: Provider,
        check: Callable[[], None],
        cleanup_seconds: float,
        refused_seconds: float = _REFUSED_SECONDS,
    ) -> None:
        self.owned: list[Owned] = []
        self.intended: list[str] = []
        self._episode_id = episode_id
        self._token = token
        self._allocations = allocations
        self._limiter = limiter
        self._provider = provider
        self._check = check
        self._delete_seconds = cleanup_seconds / 2  # an attempt that begins at its end, and a price, are clean-up too
        self._refused_seconds = refused_seconds

    def create(
        self,
        role: Role,
        request: CreateRequest,
        send: Callable[[CreateRequest], tuple[str, T]],
        *,
        wait_seconds: float,
        longest_seconds: int | None = None,
    ) -> tuple[Owned, T]:
        """Create one sandbox: `send` makes exactly one attempt and returns (sandbox id, whatever it opened).

        It lives, and is paid for, `longest_seconds` at most (the request's lifetime when nothing is said).
        Raises EpisodeAborted (deadline, transport, admission_timeout; what `check` raises: cancelled, trainer_lost),
        LeaseLost when the episode is no longer ours to write, or the ProviderError that can never succeed.
        """
        ends = time.monotonic() + wait_seconds
        longest = longest_seconds or request.lifetime_seconds
        self._allocations.intend(self._episode_id, role, request, self._token, longest_seconds=longest)
        self.intended.append(request.allocation_id)
        row = _intended(self._episode_id, role, request.allocation_id, longest)
        creation = self._limiter.creation(self._episode_id, role)
        unknown, refused_since, first_sent = 0, float("inf"), float("inf")
        pause, detail = 0.0, ""
        for attempt in range(1, _CREATE_ATTEMPTS + 1):
            try:
                self._rest(pause)
                self._check()
                creation.wait(wait_seconds=max(0.0, ends - time.monotonic()), check=self._check)
            except EpisodeAborted as error:
                cause = f"{error.detail}; the last attempt: {detail}" if detail else error.detail
                self._give_up(row, f"nothing was created: {cause}", unknown=unknown)
                raise EpisodeAborted(error.outcome, cause) from error
            sent = time.monotonic()
            first_sent = first_sent if unknown else sent  # once an answer was lost, it may run since then
            try:
                sandbox_id, opened = send(request)
            except (RateLimited, ConcurrencyLimited) as error:
                refused_since = float("inf")
                pause, kind, detail = creation.refused(error), Outcome.DEADLINE, str(error)
            except NothingSent as error:
                refused_since = min(refused_since, sent)
                if sent - refused_since > self._refused_seconds:
                    ends = sent
                pause, kind, detail = min(0.1 * 2**attempt, 2.0), Outcome.TRANSPORT, str(error)
            except OutcomeUnknown as error:
                refused_since = float("inf")
                self._allocations.unknown(row, self._token, str(error))
                unknown += 1
                if unknown > _ASK_AGAIN:
                    raise EpisodeAborted(Outcome.TRANSPORT, f"creation of {request.allocation_id}: {error}") from error
                pause, kind, detail = 0.5 * unknown, Outcome.TRANSPORT, str(error)
            except ProviderError as error:
                self._give_up(row, str(error), unknown=unknown)
                raise
            else:
                return self._own(row, sandbox_id, first_sent), opened
            if attempt == _CREATE_ATTEMPTS or time.monotonic() + pause > ends:
                self._give_up(row, detail, unknown=unknown)
                raise EpisodeAborted(kind, f"no sandbox could be created: {detail}")
        raise AssertionError("unreachable: the last attempt raises")

    def _own(self, row: Allocation, sandbox_id: str, sent: float) -> Owned:
        owned = Owned(row, sandbox_id, created=sent)
        self.owned.append(owned)
        self._allocations.created(row, sandbox_id, self._token, creating_ms=int((time.monotonic() - sent) * 1000))
        return owned

    def _give_up(self, row: Allocation, detail: str, *, unknown: int) -> None:
        """Note that nothing came of it; after an unknown answer something may have, and the reconciler finds out."""
        if not unknown:
            self._allocations.refused(row, self._token, detail)

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left, 0.5))

    def dispose(self, *several: Owned) -> bool:
        """Delete these and confirm their absence; False when one's could not be confirmed. Raises no ProviderError.

        No attempt but a sandbox's first begins once half of the clean-up's time is over.
        """
        ends = time.monotonic() + self._delete_seconds
        done = [self._dispose(owned, ends) for owned in several]  # each of them, also after one that failed
        return all(done)

    def _dispose(self, owned: Owned, ends: float) -> bool:
        if owned.absent:
            return True
        if owned.row.vcpus is None:
            with suppress(ProviderError):  # a price is worth a look, and never worth a leak
                self.note_size(owned, within_seconds=(ends - time.monotonic()) / 4)
        try:
            self._delete(owned.sandbox_id, ends)
        except ProviderError as error:
            logger.error("cleanup unresolved", extra={"sandbox": owned.sandbox_id, "error": str(error)})
            self._allocations.unresolved(owned.row, self._token, str(error))
            return False
        owned.absent = True
        self._allocations.absent(owned.row, self._token, running_ms=int((time.monotonic() - owned.created) * 1000))
        return True

    def note_size(self, owned: Owned, *, within_seconds: float = _REFUSED_CALLS_SECONDS) -> bool:
        """Write down the sandbox's real size, which is what it costs; False when it does not exist any more.

        Sets `affordable` of `owned` where a budget cannot bear that size.
        """
        ends = time.monotonic() + within_seconds
        # it changes nothing, so that a lost answer is asked for again
        for attempt in retrying(NothingSent, OutcomeUnknown, attempts=_LOOK_ATTEMPTS, within_seconds=within_seconds):
            with attempt:
                seen = self.patiently(
                    lambda: self._provider.describe(owned.sandbox_id), within_seconds=ends - time.monotonic()
                )
        if seen is not None:
            owned.row, owned.affordable = self._allocations.sized(owned.row, vcpus=seen.vcpus, memory_mb=seen.memory_mb)
        return seen is not None

    def dispose_all(self) -> list[str]:
        """Dispose of everything owned; the sandbox ids that stayed unresolved."""
        self.dispose(*self.owned)
        return [owned.sandbox_id for owned in self.owned if not owned.absent]

    def abandon(self) -> None:
        """The lease is lost: delete what is ours and write nothing."""
        ends = time.monotonic() + self._delete_seconds
        for owned in self.owned:
            if not owned.absent:
                try:
                    self._delete(owned.sandbox_id, ends)
                except ProviderError as error:
                    logger.error(
                        "abandoned sandbox not deleted", extra={"sandbox": owned.sandbox_id, "error": str(error)}
                    )

    def patiently(self, call: Callable[[], T], *, within_seconds: float = _REFUSED_CALLS_SECONDS) -> T:
        """Make a call that creates nothing; a 429 did nothing, is told to the limiter, waited out and asked again."""
        ends = time.monotonic() + within_seconds
        while True:
            try:
                return call()
            except (RateLimited, ConcurrencyLimited) as error:
                pause = _UNSHARED_PAUSE_SECONDS
                with suppress(RedisError):  # a lost lease's sandboxes have to be deleted while Redis is away, too
                    pause = self._limiter.note(error)
                pause = max(_SHORTEST_PAUSE_SECONDS, min(pause, _REFUSED_CALL_SECONDS))
                if time.monotonic() + pause > ends:
                    raise
                time.sleep(pause)

    def _delete(self, sandbox_id: str, ends: float) -> None:
        """Delete until the provider confirms the absence; raises the last ProviderError."""
        attempts = retrying(
            NothingSent,
            OutcomeUnknown,
            attempts=_DELETE_ATTEMPTS,
            within_seconds=ends - time.monotonic(),
            first_wait_seconds=_CONFIRM_WAIT_SECONDS,
        )
        for attempt in attempts:
            with attempt:
                self.patiently(
                    lambda: delete_confirmed(self._provider, sandbox_id), within_seconds=ends - time.monotonic()
                )


def _intended(episode_id: str, role: Role, allocation_id: str, longest_seconds: int) -> Allocation:
    return Allocation(
        allocation_id=allocation_id,
        episode_id=episode_id,
        role=role,
        state=AllocationState.INTENDED,
        longest_seconds=longest_seconds,
        intended_at=0,
    )
