"""Starting and ending child processes of the stack, with what they logged last in every error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.embedded import tether
from orchestrator.errors import SettingsError

_STOP_SECONDS = 5.0
"""A server that has not ended this long after SIGTERM is killed."""


def require_linux(what: str, instead: str, *, platform: str = sys.platform) -> None:
    """Raise a readable SettingsError elsewhere: jails, and ending with one's parent, are Linux's."""
    if platform != "linux":
        raise SettingsError(f"{what} needs Linux and this is {platform}; {instead}")


def leashed(program: str, *arguments: str) -> list[str]:
    """The command line that runs `program` so that it ends when this process does."""
    return [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), program, *arguments]


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    pipes: bool = False,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, so that a Ctrl-C reaches us first; its stderr goes to `log`."""
    pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe if pipes else stream,
            stderr=stream,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            env=environment,
        )


def end(child: subprocess.Popen[bytes], *, seconds: float = _STOP_SECONDS) -> bool:
    """SIGTERM, wait, SIGKILL, reap; whether it ended by itself in time."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return False
    return True


def last_lines(log: Path, count: int = 12) -> str:
    """The end of a log, for an error's text: the log itself may be gone by the time that is read."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines) or "  (it logged nothing)"
