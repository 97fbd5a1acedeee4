"""An episode's clocks: what each phase took, how much of the deadline and of the policy window is left.

Monotonic seconds; the clock is a parameter so that tests own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.errors import EpisodeAborted
from orchestrator.vocabulary import Outcome, Phase


class Timeline:
    """Phase durations, the global deadline and the policy window of one episode."""

    def __init__(
        self, *, deadline_seconds: float, window_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds: dict[Phase, float] = {}
        self._clock = clock
        self._deadline_seconds = deadline_seconds
        self._window_seconds = window_seconds
        self._deadline: float | None = None
        self._window_opened: float | None = None

    def start(self) -> None:
        """The global deadline runs from here (reset), after admission."""
        self._deadline = self._clock() + self._deadline_seconds

    def open_window(self) -> None:
        """The policy window runs from here (reset is ready)."""
        self._window_opened = self._clock()

    def close_window(self) -> None:
        """The policy has submitted or is out: what it took becomes the policy phase."""
        if self._window_opened is not None and Phase.POLICY not in self.seconds:
            self.seconds[Phase.POLICY] = self._clock() - self._window_opened

    def window_left(self) -> float:
        """Seconds left of the policy window; negative when it is over."""
        if self._window_opened is None:
            return self._window_seconds
        return self._window_opened + self._window_seconds - self._clock()

    def left(self) -> float:
        """Seconds left of the global deadline; negative when it is over."""
        return self._deadline_seconds if self._deadline is None else self._deadline - self._clock()

    def bound(self, seconds: float) -> float:
        """The shorter of `seconds` and what is left; raises EpisodeAborted(deadline) when nothing is."""
        left = self.left()
        if left <= 0:
            raise EpisodeAborted(Outcome.DEADLINE, f"the episode's {self._deadline_seconds:g} s are over")
        return min(seconds, left)

    def note(self, phase: Phase, seconds: float) -> None:
        """Add to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Time a block as (part of) a phase, also when it raises."""
        began = self._clock()
        try:
            yield
        finally:
            self.note(phase, self._clock() - began)
