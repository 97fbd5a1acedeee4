"""Runs the benchmarks that are named, or all; prints one table and writes bench.json.

    python -m tests.bench
    python -m tests.bench episode_overhead tool_call

Ends with 0 whether goals are met or not, with 1 when a benchmark could not be run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench.creation_ceiling import creation_ceiling
from tests.bench.demo import demo
from tests.bench.episode_overhead import episode_overhead
from tests.bench.local_service import local_service
from tests.bench.parallel_rollouts import parallel_rollouts
from tests.bench.permits import permits
from tests.bench.rows import Row, table
from tests.bench.scrape import scrape
from tests.bench.simulation import simulation
from tests.bench.throughput import throughput
from tests.bench.tool_call import tool_call
from tests.bench.worker_loss import worker_loss
from tests.bench.worker_memory import worker_memory

BENCHES: Mapping[str, Callable[[], list[Row]]] = {
    bench.__name__: bench
    for bench in (
        local_service,
        tool_call,
        episode_overhead,
        worker_memory,
        demo,
        throughput,
        creation_ceiling,
        permits,
        simulation,
        worker_loss,
        parallel_rollouts,
        scrape,
    )
}


def main() -> int:
    """Run, print, write; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure the farm on this machine.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default; {', '.join(BENCHES)}")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where to write the rows")
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHES.keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(BENCHES)}")
    rows: list[Row] = []
    failed = []
    machine = _machine()
    for name in options.names or BENCHES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            rows += BENCHES[name]()
        except Exception:  # noqa: BLE001 - the outermost loop: the others are still worth their time
            traceback.print_exc()
            failed.append(name)
    print(table(rows))
    print(*(f"{row.name}: {row.how}" for row in rows), sep="\n")
    options.json.write_text(json.dumps({"machine": machine, "rows": [row.as_json() for row in rows]}, indent=2) + "\n")
    if failed:
        print(f"could not be run: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _machine() -> dict[str, Any]:
    """What the numbers depend on; other load at the start makes them worse."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "load_at_start": os.getloadavg()[0],
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


if __name__ == "__main__":
    sys.exit(main())
