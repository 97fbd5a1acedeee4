"""What a `rollout-farm` command's exit code means; scripts may rely on it."""

from __future__ import annotations

from enum import IntEnum

from orchestrator.errors import CapacityError, EpisodeAborted, FarmError, ProviderError, RedisUnavailable, SettingsError
from orchestrator.tasks import TaskError


class ExitCode(IntEnum):
    """Named exit codes."""

    OK = 0
    FAILED = 1  # it ran, and its result is not what it should be
    USAGE = 2  # unknown option or argument
    SETTINGS = 3  # a setting is wrong
    REDIS = 4  # Redis cannot be reached
    PROVIDER = 5  # the sandbox provider refused or failed
    CAPACITY = 6  # no room: it can never be live at once, other episodes hold the places, or no worker is alive
    TASK = 7  # a task file is wrong
    ABORTED = 8  # an episode ended without a score
    INTERRUPTED = 130  # Ctrl-C
    OUTPUT_CLOSED = 141  # who read the output went away, as head does: what a shell says of SIGPIPE


_BY_ERROR: tuple[tuple[type[Exception], ExitCode], ...] = (
    (SettingsError, ExitCode.SETTINGS),
    (RedisUnavailable, ExitCode.REDIS),
    (ProviderError, ExitCode.PROVIDER),
    (CapacityError, ExitCode.CAPACITY),
    (TaskError, ExitCode.TASK),
    (EpisodeAborted, ExitCode.ABORTED),
)


def exit_code(error: Exception) -> ExitCode:
    """The code of an error that ended a command."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.FAILED)


_SAID_BY_CHILDREN: dict[int, type[FarmError]] = {
    ExitCode.SETTINGS: SettingsError,
    ExitCode.REDIS: RedisUnavailable,
    ExitCode.PROVIDER: ProviderError,
}


def child_error(code: int) -> type[FarmError] | None:
    """The kind of error that a command of ours reported and ended by, where its code tells a starter what to do."""
    return _SAID_BY_CHILDREN.get(code)
