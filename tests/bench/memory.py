"""Proportional memory of process trees, from /proc: a page that n processes share counts 1/n for each."""

from __future__ import annotations

from pathlib import Path

_KIB = 1024


def tree_of(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        found += _children(parent)
    return found


def pss_mb(pids: list[int]) -> float:
    """Their PSS together, in 10^6 bytes."""
    return sum(_pss_bytes(pid) for pid in pids) / 1e6


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        pass
    return children


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * _KIB
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return 0
