"""What the SDK raises, turned into the farm's typed errors. Decided by class and status alone, never by text.

Always holds: every error that leaves `control_plane` or `in_sandbox` is a `ProviderError`; whatever is not known to
have had no effect is `OutcomeUnknown`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import e2b
import httpx
from connectrpc.code import Code
from connectrpc.errors import ConnectError

from orchestrator.errors import (
    AnswerLate,
    AuthenticationFailed,
    ConcurrencyLimited,
    CreateRejected,
    NothingSent,
    OutcomeUnknown,
    ProviderError,
    RateLimited,
    SandboxGone,
)
from workers.sandboxes.headers import Answer, forget_answer, last_answer, last_page

logger = logging.getLogger(__name__)

_IN_DOUBT = {"idempotency_in_progress", "idempotency_outcome_unknown"}
"""Error codes of a create whose key is known but whose fate is not (409 or 422)."""


class AgentGaveUp(OutcomeUnknown):
    """The agent itself says that what it started was not done in the time that it was told."""


@contextmanager
def control_plane(call: str, *, creates: bool = False) -> Iterator[None]:
    """Translate whatever one control-plane call raises; `creates` when a refusal means that nothing was allocated."""
    forget_answer()
    try:
        yield
    except ProviderError:
        raise
    except Exception as error:  # the SDK lets httpx, json, type and bare Exceptions through
        raise _from_answer(call, error, last_answer(), creates=creates) from error


@contextmanager
def in_sandbox(call: str) -> Iterator[None]:
    """Translate whatever one call to a sandbox's agent raises."""
    forget_answer()
    try:
        yield
    except ProviderError:
        raise
    except Exception as error:  # as above
        raise _from_agent(call, error) from error


def _from_answer(call: str, error: Exception, answer: Answer | None, *, creates: bool) -> ProviderError:
    detail = _detail(call, error)
    if answer is None:
        return _without_answer(detail, error)
    status = answer.status
    if status in (401, 403):
        return AuthenticationFailed(f"{detail}; check E2B_API_KEY")
    if status == 429:
        return _too_many(detail, answer)
    if status == 404 and not creates:  # the API itself says so in JSON; a page is of a proxy that found no way to it
        return SandboxGone(detail) if answer.is_json else OutcomeUnknown(detail)
    if status == 409 or answer.error_code in _IN_DOUBT:
        mismatch = answer.error_code is not None and answer.error_code not in _IN_DOUBT
        return CreateRejected(detail) if creates and mismatch else OutcomeUnknown(detail)
    if 400 <= status < 500 and status != 408:
        return CreateRejected(detail) if creates else ProviderError(detail)
    return OutcomeUnknown(detail)


def _without_answer(detail: str, error: Exception) -> ProviderError:
    # ConnectError and ConnectTimeout are raised before a byte of the request was written.
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return NothingSent(detail)
    if isinstance(error, e2b.AuthenticationException):
        return AuthenticationFailed(f"{detail}; set E2B_API_KEY")
    if isinstance(error, e2b.InvalidArgumentException):  # the SDK refused it before sending
        return CreateRejected(detail)
    return OutcomeUnknown(detail)


def _too_many(detail: str, answer: Answer) -> ProviderError:
    # Only the API itself counts what runs, and says so in JSON without a header; a proxy in front knows requests only.
    if answer.retry_after_seconds is None and not answer.names_a_rate and answer.is_json:
        return ConcurrencyLimited(detail)
    return RateLimited(detail, answer.retry_after_seconds)


def _from_agent(call: str, error: Exception) -> ProviderError:
    detail = _detail(call, error)
    match error:
        case e2b.SandboxNotRunningException() | e2b.SandboxNotFoundException():
            return SandboxGone(detail)
        case e2b.AuthenticationException():
            return AuthenticationFailed(detail)
        case e2b.RateLimitException():
            answer = last_answer()
            return RateLimited(detail, answer.retry_after_seconds if answer else None)
        case e2b.NotEnoughSpaceException() | e2b.InvalidArgumentException():
            return ProviderError(detail)  # refused: the disk is full, or the path names a directory
        case e2b.SandboxUnreachableException():
            return OutcomeUnknown(detail)
        case _ if last_page() is not None:  # 504, 500, 520 of something in between: the agent has said nothing
            return OutcomeUnknown(detail)
        case e2b.TimeoutException() if _agent_says(error, Code.DEADLINE_EXCEEDED):
            return AgentGaveUp(detail)
        case e2b.TimeoutException():
            return AnswerLate(detail)
        case _:
            return OutcomeUnknown(detail)


def _agent_says(error: Exception, code: Code) -> bool:
    """Whether the SDK raised this for what the agent answered; what is raised here, of a clock, say, has a cause."""
    said = error.__cause__ or error.__context__
    return isinstance(said, ConnectError) and said.code is code and said.__cause__ is None


def _detail(call: str, error: Exception) -> str:
    return f"{call}: {type(error).__name__}: {str(error)[:300]}"
