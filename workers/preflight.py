"""Asks the provider once, before a worker starts, whether it accepts the key.

Asked in a fork that ends at once: the process that will fork slots must not have made a request itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from orchestrator.errors import AuthenticationFailed, ProviderError
from orchestrator.provider import Provider

_REASON_BYTES = 2_000
"""Less than a pipe holds, so that the fork never blocks on writing it."""


def require_accepted_key(make_provider: Callable[[], Provider]) -> None:
    """Raise AuthenticationFailed when the provider refuses the key; a provider that is away is no reason to stop."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            reason = _refusal(make_provider)
            os.write(writer, reason.encode()[:_REASON_BYTES])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        reason = answers.read().decode(errors="replace")
    os.waitpid(pid, 0)
    if reason:
        raise AuthenticationFailed(f"the sandbox provider refuses the key ({reason}); correct E2B_API_KEY")


def _refusal(make_provider: Callable[[], Provider]) -> str:
    try:
        make_provider().list({"farm": "preflight"})
    except AuthenticationFailed as error:
        return str(error) or "no reason given"
    except ProviderError:
        return ""
    return ""
