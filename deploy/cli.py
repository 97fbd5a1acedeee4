"""The entry point of `rollout-farm`, and what a Ctrl-C does before the command is there.

Always holds: importing this module imports nothing of weight. While the command itself is imported nothing runs that
would have to be stopped, so a Ctrl-C then ends the process at once and silently, whatever is being imported; from there
on it is a KeyboardInterrupt, as anywhere. Where the caller ignores SIGINT, as nohup does, it stays ignored.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

_INTERRUPTED = 130
"""ExitCode.INTERRUPTED, whose module is among what is imported."""

_NEW_OBJECTS = 50_000
"""Of so many, instead of 700, the collector looks for cycles: what is imported stays, and looking through it again and
again took a seventh of a worker's start."""


def main() -> None:
    """Entry point of the distribution."""
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from deploy.command_line import main as command

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
