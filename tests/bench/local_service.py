"""The local sandbox service: creating a sandbox, running `true` in it, and what an idle one holds, over the e2b SDK."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from pathlib import Path
from statistics import median

import e2b

from deploy.embedded import LocalSandboxes
from tests.bench.memory import tree_pss_mb
from tests.bench.rows import Goal, Row, spread
from tests.bench.stand import milliseconds

_CREATIONS = 30
_RUNS = 200
_IDLE = 20
_SETTLE_SECONDS = 1.0


def local_service() -> list[Row]:
    """Rows of one client's calls, one after another."""
    key = f"local-{secrets.token_hex(16)}"
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, LocalSandboxes(Path(directory), api_key=key) as it:
        sandboxes = e2b.E2B(api_key=key, api_url=it.url, sandbox_url=it.url, retries=0, debug=False).Sandbox
        first = sandboxes.create(timeout=300)
        first.commands.run("true")
        creations = []
        for _ in range(_CREATIONS):
            began = time.perf_counter()
            made = sandboxes.create(timeout=60)
            creations.append(time.perf_counter() - began)
            made.kill()
        runs = []
        for _ in range(_RUNS):
            began = time.perf_counter()
            first.commands.run("true")
            runs.append(time.perf_counter() - began)
        before = _tree_mb()
        idle = [sandboxes.create(timeout=300) for _ in range(_IDLE)]
        each = (_tree_mb() - before) / _IDLE
        for made in (*idle, first):
            made.kill()
    create_ms, run_ms = milliseconds(creations), milliseconds(runs)
    return [
        Row("local sandbox: create, p50", median(create_ms), "ms", Goal("<=", 60), spread(create_ms)),
        Row("local sandbox: run true, p50", median(run_ms), "ms", Goal("<=", 8), spread(run_ms)),
        Row(
            "local sandbox: idle, PSS",
            each,
            "MB",
            Goal("<=", 15),
            f"{_IDLE} more idle sandboxes, all processes of the service, divided by {_IDLE}",
        ),
    ]


def _tree_mb() -> float:
    time.sleep(_SETTLE_SECONDS)
    return tree_pss_mb(os.getpid())
