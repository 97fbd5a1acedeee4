"""The one tenacity factory: who may try again, how often, how far apart.

Three places repeat calls without it: redis-py's own retries (connection.py), creations and what waits as long as the
limiter says after a 429 (workers/allocator.py: how long depends on what is known of the last try), and the reading of
an artifact whose writer may be at work on it (workers/sandboxes/sandbox.py).
"""

from __future__ import annotations

from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_exponential,
    wait_random,
)


def retrying(
    *errors: type[BaseException],
    attempts: int,
    within_seconds: float = float("inf"),
    first_wait_seconds: float = 0.2,
    longest_wait_seconds: float = 5.0,
) -> Retrying:
    """Repeat a call on these errors with jittered exponential waits; the last error is raised as it is.

    No attempt but the first begins once `within_seconds` are over.
    """

    return Retrying(
        retry=retry_if_exception_type(errors),
        stop=stop_after_attempt(attempts) | stop_before_delay(within_seconds),
        wait=wait_exponential(multiplier=first_wait_seconds, max=longest_wait_seconds)
        + wait_random(0, first_wait_seconds),
        reraise=True,
    )
