"""The finding: one thing that was looked at, how bad it is, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Status(StrEnum):
    """With one `fail` the farm cannot run as configured."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's report."""

    name: str
    status: Status
    detail: str
    mend: str = ""

    def as_json(self) -> dict[str, str]:
        """For --json."""
        return {key: str(value) for key, value in asdict(self).items()}


def ok(name: str, detail: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Status.OK, detail)


def warn(name: str, detail: str, mend: str) -> Finding:
    """The farm runs, and something will hurt."""
    return Finding(name, Status.WARN, detail, mend)


def fail(name: str, detail: str, mend: str) -> Finding:
    """The farm cannot run as configured."""
    return Finding(name, Status.FAIL, detail, mend)


def healthy(findings: Iterable[Finding]) -> bool:
    """Whether nothing that is needed is missing."""
    return all(finding.status is not Status.FAIL for finding in findings)
