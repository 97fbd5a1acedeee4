"""Directories that live as long as their process: what a killed one left is removed when the next is made.

What always holds: a directory is swept only when it has our lock file and nobody holds that lock, so that neither a
living process loses its files nor anybody else's directory is touched. The system frees the lock of a killed process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "farm-"
_LOCK = ".rollout-farm.lock"


class TemporaryDirectory:
    """A fresh directory beside those of other processes, in the system's place for them or in `parent`."""

    def __init__(self, parent: Path | None = None) -> None:
        where = parent or Path(tempfile.gettempdir())
        _sweep(where)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        fresh = self.path / f"{_LOCK}.new"
        self._descriptor: int | None = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        fresh.rename(self.path / _LOCK)  # it has its name when it is held: no sweep finds it free

    def remove(self) -> None:
        """Remove it with all that is in it. Can be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _sweep(where: Path) -> None:
    for lock in where.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or just removed
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its process lives
            continue
        else:
            logger.info("removing what a killed process left", extra={"directory": str(lock.parent)})
            shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(descriptor)
