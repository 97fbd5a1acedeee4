"""Looks at the farm that somebody waits for only so long.

What always holds: who asks is answered within the seconds given, whatever Redis does meanwhile; only so many looks go
on at once; one that is late ends by itself, in a thread that keeps no process alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """Gives looks `seconds`, and room for `places` of them at a time."""

    def __init__(self, *, seconds: float, places: int) -> None:
        self._seconds = seconds
        self._places = threading.BoundedSemaphore(places)

    def within(self, look: Callable[[], T]) -> T:
        """What `look` returns or raises; TimeoutError when that takes too long, its wait for a place included."""
        ends = time.monotonic() + self._seconds
        if not self._places.acquire(timeout=self._seconds):
            raise TimeoutError(f"no look has ended for {self._seconds:g} s")
        looked: Future[T] = Future()
        threading.Thread(target=self._run, args=(look, looked), name="look", daemon=True).start()
        try:
            return looked.result(max(0.0, ends - time.monotonic()))
        except TimeoutError:
            if looked.done():
                raise  # it is the look's own
            raise TimeoutError(f"not read within {self._seconds:g} s") from None

    def _run(self, look: Callable[[], T], looked: Future[T]) -> None:
        try:
            looked.set_result(look())
        except BaseException as error:  # noqa: BLE001 - handed to who waits
            looked.set_exception(error)
        finally:
            self._places.release()
