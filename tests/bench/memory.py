"""Proportional memory of process trees, from /proc: a page that n processes share counts 1/n for each."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import descendants

_KIB = 1024


def tree_pss_mb(pid: int) -> float:
    """The PSS of a process and all its descendants together, in 10^6 bytes."""
    return sum(_pss_bytes(each) for each, _ in descendants(pid)) / 1e6


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * _KIB
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return 0
