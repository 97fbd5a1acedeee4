"""What a container is to a process, without an engine: its first process, another user, a root that cannot be written.

Not shown by it: the image's own files, its user and its entry point, and how an engine sends signals.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import ROOT
from workers.e2b_local.capability import find_bwrap

HOST = "pod-of-a-test"
USER = 10001


def contained(command: Sequence[str], *, writable: Sequence[Path] = (), own_network: bool = False) -> list[str]:
    """The command line that runs `command` so; only /tmp, which is empty, and `writable` can be written."""
    bwrap = find_bwrap()
    assert bwrap is not None, "bubblewrap is not installed: it comes with the extra local"
    given = [str(bwrap), "--unshare-user", "--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL"]
    given += ["--unshare-pid", "--as-pid-1", "--unshare-uts", "--hostname", HOST, "--die-with-parent"]
    given += ["--unshare-net"] if own_network else []
    given += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
    for path in (ROOT, Path(sys.prefix)):  # they may lie below /tmp
        given += ["--ro-bind", str(path), str(path)]
    for path in writable:
        given += ["--bind", str(path), str(path)]
    return [*given, "--chdir", "/tmp", "--", *command]
