"""The directory that a training run writes to, held by one run at a time.

    <directory>/.lock   empty; its lock is the run's, and goes with the process

What always holds: two runs never write into one directory at once, wherever they run, as far as its file system has
locks; a directory that was made for a run which then wrote nothing is gone again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from orchestrator.errors import SettingsError

LOCK = ".lock"

logger = logging.getLogger(__name__)


class OutputDirectory:
    """Holds the directory while the block lasts; makes it when there is none.

    Entering raises SettingsError when another run holds it, or when it cannot be a directory that is written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._made = False
        """The directory is ours to remove; one that was there may have an owner and rights of its own."""

    def __enter__(self) -> Self:
        try:
            self._descriptor = self._locked()
        except OSError as error:
            why = "not a directory" if isinstance(error, (FileExistsError, NotADirectoryError)) else error.strerror
            raise SettingsError(f"{self.path}: cannot be written to ({why}); choose another --output-dir") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it. Can be called again."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):  # what cannot be cleared away may stay
            if [found.name for found in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                if self._made:
                    self.path.rmdir()
        os.close(descriptor)

    def _locked(self) -> int:
        while True:
            if not self.path.is_dir():
                self.path.mkdir(parents=True, exist_ok=True)
                self._made = True
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._lock(descriptor)
                if _is_at(descriptor, self.path / LOCK):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the one that held it cleared it away meanwhile

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"{self.path}: another run is writing there; wait for it, or choose another --output-dir"
            ) from None
        except OSError as error:
            logger.warning("%s: no locks there (%s); see that no other run writes to it", self.path, error.strerror)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
