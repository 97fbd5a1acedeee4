"""`rollout-farm demo`, once installed: start of the command to its end."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from statistics import median

from tests.bench.rows import Goal, Row, spread

_RUNS = 3
_LIMIT_SECONDS = 120


def demo() -> list[Row]:
    """One row, the median of three."""
    seconds = [_run() for _ in range(_RUNS)]
    return [Row("rollout-farm demo, median", median(seconds), "s", Goal("<=", 10), spread(seconds))]


def _run() -> float:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli", "demo"],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
        seconds = time.monotonic() - began
    if done.returncode != 0:
        raise RuntimeError(f"the demo ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return seconds
