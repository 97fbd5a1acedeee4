"""A plugin of pytest, `-p tests.support.warm_suite`: the suite's own processes are warm ones, too.

Each process of pytest-xdist imports for fifteen seconds what the tests import; forked from one that has, it need not.
The stages that other warm processes come from are then one set for the whole suite. Whoever runs a few tests does
without: this imports torch and the dashboard's page in any case.

pytest-xdist starts `python -m tests.support.warm_suite SOCKET` in Python's place; that asks for a process that takes
over its standard streams, which are pytest-xdist's line to it, and ends with that one's exit code.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.template import NUMBER_BYTES, Request, ask


def pytest_xdist_setupnodes(config: Any, specs: Any) -> None:
    """Start the stages, and let the processes be forked from the last."""
    from tests.support import warm

    lasting = ExitStack()
    config.add_cleanup(lasting.close)
    directory = lasting.enter_context(warm.stages(warm.SUITE_STAGES))
    os.environ[warm.SHARED] = str(directory)
    for spec in specs:
        spec.python = f"{sys.executable} -m {__name__} {directory / warm.SUITE_STAGES[-1]}"


def _launch(path: str, line: str) -> int:
    """Ask for a process that runs the line; its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it hears of a Ctrl-C itself
    request = Request(__spec__.name, ["run", line], dict(os.environ), str(Path.cwd()), own_session=False)
    told = ask(path, request, [0, 1, 2])
    told.recv(NUMBER_BYTES)
    return int(told.recv(NUMBER_BYTES) or 1)


if __name__ == "__main__":
    first, *_, program = sys.argv[1:]  # pytest-xdist appends Python's own options: -u -c and a line
    if first == "run":
        exec(program, {"__name__": "__main__"})
    else:
        sys.exit(_launch(first, program))
