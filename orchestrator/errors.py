"""Every error the farm raises on purpose, named for the boundary that was crossed.

A failed solve is a result (reward 0), never an exception. An exception of this tree means that *we* failed, or that
the caller must change something; its text says what to do next. Nobody matches on texts: the class carries the meaning.

    FarmError
    ├── SettingsError            a setting or command-line value is wrong
    ├── TaskError                a task file is wrong (`orchestrator.tasks`); `.problems` has a line each
    ├── CapacityError            there is no room
    │   ├── NeverFits              so many can never be live at once, as the farm stands: add workers or limit
    │   └── PlacesTaken            other episodes hold the places: wait for them
    ├── RedisUnavailable         the farm's Redis cannot be reached
    ├── LeaseLost                this slot's token is no longer the episode's
    ├── EpisodeAborted           an episode ended without a score; `.outcome` says why
    │   └── InfrastructureLost   raised by a step whose sandbox, server or transport is gone
    ├── EpisodeClosed            a call on an episode that already ended
    ├── CommandRefused           a terminal command that cannot be carried; nothing was run
    │   └── CommandTooLarge        over the limit
    ├── ReceiptOverdue           an episode has no receipt within the time that the caller, or its budgets, gave it
    ├── NotAlike                 two evaluations cannot be compared (`trainer.evaluation.comparison`)
    ├── ActionPending            the worker took the action and has not answered within the caller's patience
    └── ProviderError            a sandbox provider refused or failed
        ├── AuthenticationFailed   wrong key: fatal at once, never retried
        ├── CreateRejected         the request itself is wrong (template, body): never retried
        ├── NothingSent            connection refused before a byte left: safe to repeat
        │   └── ServerAtCapacity     every place of the Terminus server is taken: wait for one
        ├── RateLimited            429, rate kind; `.retry_after_seconds` when the provider said so
        ├── ConcurrencyLimited     429, concurrency kind: heals with a deletion, not with time
        ├── OutcomeUnknown         the answer was lost: something may have been allocated or done
        │   └── AnswerLate           it did not come in time
        ├── SandboxGone            the sandbox does not exist (any more)
        ├── ArtifactMissing        no regular file at that path
        └── ArtifactTooLarge       the file is larger than the transfer limit
"""

from __future__ import annotations

from orchestrator.vocabulary import Outcome


class FarmError(Exception):
    """Base of every error the farm raises on purpose."""


class SettingsError(FarmError):
    """A setting is wrong; the text names the variable and says what is expected."""


class CapacityError(FarmError):
    """There is no room; the text says what to do for it."""


class NeverFits(CapacityError):
    """So many can never be live at once as the farm stands; the text says how much to add, or what to start."""


class PlacesTaken(CapacityError):
    """There are places enough, and other episodes held them all the time that was waited."""


class RedisUnavailable(FarmError):
    """The farm's Redis cannot be reached or refuses us."""


class LeaseLost(FarmError):
    """Another owner holds this episode's token: delete what is ours, write nothing, leave."""


class EpisodeAborted(FarmError):
    """An episode ended without a score."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome = outcome
        self.detail = detail


class InfrastructureLost(EpisodeAborted):
    """A step's sandbox, server or transport is gone; remembered and raised again when the reward is asked for."""


class EpisodeClosed(FarmError):
    """The episode has ended; read its receipt."""


class ReceiptOverdue(FarmError, TimeoutError):
    """No receipt came in time: of an episode that was waited for, or of any. It may still come."""


class CommandRefused(FarmError, ValueError):
    """A terminal command is none that can be carried; nothing was run, the episode goes on."""


class CommandTooLarge(CommandRefused):
    """A terminal command is larger than one message may be."""


class ActionPending(FarmError):
    """The action was taken by the worker and is still running; ask again with the same number."""


class ProviderError(FarmError):
    """A sandbox provider refused or failed."""


class AuthenticationFailed(ProviderError):
    """The provider does not accept the API key."""


class CreateRejected(ProviderError):
    """The provider will never accept this create request as it stands."""


class NothingSent(ProviderError):
    """The connection was refused before anything was sent."""


class ServerAtCapacity(NothingSent):
    """Every place of the Terminus server is taken; nothing was created."""


class RateLimited(ProviderError):
    """429 of the rate kind: everybody waits."""

    def __init__(self, detail: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class ConcurrencyLimited(ProviderError):
    """429 of the concurrency kind: only a deletion helps."""


class OutcomeUnknown(ProviderError):
    """The request left and its answer was lost."""


class AnswerLate(OutcomeUnknown):
    """The request left and its answer did not come in time."""


class SandboxGone(ProviderError):
    """No such sandbox, or not any more."""


class ArtifactMissing(ProviderError):
    """No regular file at that path in the sandbox."""


class ArtifactTooLarge(ProviderError):
    """The file exceeds the transfer limit."""
