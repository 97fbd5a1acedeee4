"""Doctor: what this host has and lacks for the configured mode. Looks at the edge, judges in pure functions."""

from __future__ import annotations

from deploy.doctor.examine import examine
from deploy.doctor.findings import Finding, Status, healthy

__all__ = ["Finding", "Status", "examine", "healthy"]
