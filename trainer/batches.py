"""The episodes of one generation: which resets belong together, and where their places come from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.episodes import Episode
from orchestrator.errors import CapacityError, RedisUnavailable
from orchestrator.pool import Reservation

logger = logging.getLogger(__name__)


@dataclass
class Batch:
    """The resets that belong together."""

    size: int
    reserve: Callable[[int], Reservation] | None
    group_of: Callable[[int], str | None] = field(default=lambda row: None)
    reservation: Reservation | None = None
    watch: threading.Timer | None = None
    over: bool = False
    """One of its episodes found no place, so the others were ended."""
    used: bool = False
    """An episode of it was acted on or scored: its resets are done."""
    episodes: list[Episode] = field(default_factory=list)

    def takes(self, before: Episode | None) -> bool:
        """Whether the next episode of the environment that had `before` can be one of it."""
        return len(self.episodes) < self.size and before not in self.episodes

    def refuse_more(self, before: Episode | None) -> None:
        """Raise CapacityError when the generation goes on beyond it: nobody acts before all of one are reset.

        Its episodes' windows would run while the others wait for places, which these may hold themselves.
        """
        if not self.used and before not in self.episodes:
            raise CapacityError(
                f"a generation has more than batch_size={self.size} episodes: give RemoteEpisodes the most of one, the "
                "larger of per_device_train_batch_size * steps_per_generation and per_device_eval_batch_size (8 by "
                "default)"
            )

    def end(self) -> None:
        """Give back the places that no episode took; does not raise."""
        if self.watch is not None:
            self.watch.cancel()
        if self.reservation is not None:
            try:
                self.reservation.release()
            except RedisUnavailable as error:
                logger.error("reservation not given back, it expires by itself: %s", error)
