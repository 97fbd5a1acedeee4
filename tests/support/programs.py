"""Programs that pip does not have and some tests need; without one its tests are skipped, which fails in CI."""

from __future__ import annotations

import shutil

import pytest

_PACKAGES = {"chromium": "chromium", "prometheus": "prometheus", "promtool": "prometheus"}
"""Program -> Debian's package of it."""


def program(name: str) -> str:
    """Where the program lies; ends the test as skipped when it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; on Debian: apt install {_PACKAGES[name]}")
    return path
