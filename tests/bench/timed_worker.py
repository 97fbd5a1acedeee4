"""A worker as `rollout-farm worker` starts it, on a provider that notes its calls: `python -m ... FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.commands.resolve import connected_settings, provider_of
from deploy.logs import start_logging
from tests.bench.timed_provider import CallLog, TimedProvider
from workers.crew import run_crew


def main(log: Path) -> None:
    """Run it until SIGTERM."""
    settings = connected_settings()
    start_logging(settings)
    provider_of(settings)  # as that command does: imports the SDK before the first fork
    run_crew(settings, "timed", 1, lambda: TimedProvider(provider_of(settings), CallLog(log)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
