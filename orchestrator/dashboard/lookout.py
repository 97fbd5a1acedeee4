"""Looking at the farm for everybody who watches: at most two looks a second, however many pages are open.

What always holds: nobody waits for a look that another page has begun, but is shown the last one; a look is a handful
of round trips whose size does not grow with the receipts or the queue; when Redis is away the last look stays, and says
so. Only a trouble's kind is shown: an error's text can hold an address.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from redis.exceptions import RedisError

from orchestrator.dashboard.history import Ended, History
from orchestrator.errors import FarmError
from orchestrator.farm import Farm
from orchestrator.leadership import leader
from orchestrator.metrics import FarmReading, read
from orchestrator.presence import WorkerRow
from orchestrator.receipts import Receipts
from orchestrator.records import Allocation, SettledReceipt
from orchestrator.redis_address import without_password
from orchestrator.rows import EpisodeRow
from orchestrator.spending import cost_so_far
from orchestrator.transcripts import read_transcript
from orchestrator.unresolved import Item
from orchestrator.vocabulary import EpisodeState

logger = logging.getLogger(__name__)

AWAY = "The farm's Redis does not answer: what you see is the last look."
_BUSY = "Reading the episode ..."

_AGE_SECONDS = 0.5
"""A look this young serves the next page too; pages ask once a second."""
_RUNNING_ROWS = 40
_QUEUED_ROWS = 10
"""Open episodes in the table."""
_EPISODES = 16
"""Episodes kept that somebody looked at: a transcript has a megabyte by default."""
_SETTLED_AGE_SECONDS = 30.0
"""An ended, settled episode only changes by expiring."""


@dataclass(frozen=True, eq=False)
class Look:
    """One look. Times are unix seconds of Redis."""

    at: float
    reading: FarmReading
    workers: tuple[WorkerRow, ...]
    leader: str | None
    open_count: int
    running: tuple[EpisodeRow, ...]
    """The newest that have begun, newest first."""
    queued: tuple[EpisodeRow, ...]
    """The first in the queue."""
    starts: tuple[float, ...]
    """When each episode that runs began."""
    ended: tuple[Ended, ...]
    """Newest first."""
    stuck: tuple[Allocation, ...]
    """Sandboxes whose end or existence is not confirmed."""
    not_settled: tuple[Item, ...]
    """What else the reconcilers could not do."""


@dataclass(frozen=True, eq=False)
class View:
    """The last look, None before the first, and why it is not the newest."""

    look: Look | None
    trouble: str = ""


@dataclass(frozen=True, eq=False)
class EpisodeView:
    """One episode as it stands; without row and receipt the farm does not know it. `at` as in Look."""

    episode_id: str
    at: float
    row: EpisodeRow | None = None
    settled: SettledReceipt | None = None
    allocations: tuple[Allocation, ...] = ()
    transcript: tuple[Mapping[str, Any], ...] = ()
    costs: Mapping[str, int] = field(default_factory=dict)
    """Allocation id -> what its sandbox has cost by `at`, in pico-dollars."""
    trouble: str = ""

    @property
    def known(self) -> bool:
        """Whether the farm knows it."""
        return self.row is not None or self.settled is not None

    @property
    def over(self) -> bool:
        """Whether nothing of it changes any more."""
        return self.settled is not None and all(row.state.settled for row in self.allocations)


class Lookout:
    """Looks, and keeps what it saw. For any number of threads."""

    def __init__(self, farm: Farm, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._farm = farm
        self._clock = clock
        self._looking = threading.Lock()
        self._history = History(Receipts(farm.redis, farm.ledger.allocations))
        self._view = View(None)
        self._looked = float("-inf")
        self._finding = threading.Lock()
        self._found: OrderedDict[str, tuple[float, EpisodeView]] = OrderedDict()

    def view(self) -> View:
        """The farm, at most half a second old unless another thread looks just now."""
        if self._clock() - self._looked < _AGE_SECONDS or not self._looking.acquire(blocking=False):
            return self._view
        try:
            try:
                self._view = View(self._look())
            except (RedisError, OSError) as error:
                logger.warning("not read: %s", without_password(str(error)))
                self._view = replace(self._view, trouble=AWAY)
            self._looked = self._clock()
        finally:
            self._looking.release()
        return self._view

    def episode(self, episode_id: str) -> EpisodeView:
        """One episode, likewise."""
        looked, known = self._found.get(episode_id, (float("-inf"), None))
        age = self._clock() - looked
        if known is not None and age < (_SETTLED_AGE_SECONDS if known.over else _AGE_SECONDS):
            return known
        if not self._finding.acquire(blocking=False):
            return known or EpisodeView(episode_id, 0.0, trouble=_BUSY)
        try:
            try:
                view = self.find(episode_id)
            except (RedisError, OSError) as error:
                logger.warning("not read: %s", without_password(str(error)))
                view = replace(known or EpisodeView(episode_id, 0.0), trouble=AWAY)
            self._found[episode_id] = (self._clock(), view)
            self._found.move_to_end(episode_id)
            while len(self._found) > _EPISODES:
                self._found.popitem(last=False)
        finally:
            self._finding.release()
        return view

    def find(self, episode_id: str) -> EpisodeView:
        """Look one episode up; raises RedisError."""
        ledger = self._farm.ledger
        row, now = ledger.row(episode_id), ledger.now()
        try:
            settled = ledger.receipt(episode_id)
        except FarmError as error:
            return EpisodeView(episode_id, now, row, trouble=str(error))
        if row is None and settled is None:
            return EpisodeView(episode_id, now)
        if settled is not None:
            allocations = settled.allocations
        else:
            found = ledger.allocations.each(ledger.allocation_ids(episode_id))
            allocations = tuple(one for one in found if one is not None)
        transcript = tuple(read_transcript(self._farm.redis, episode_id))
        costs = {one.allocation_id: cost_so_far(ledger.allocations, one, now) for one in allocations}
        known = {name: cost for name, cost in costs.items() if cost is not None}
        return EpisodeView(episode_id, now, row, settled, allocations, transcript, known)

    def _look(self) -> Look:
        farm = self._farm
        reading, now = read(farm), farm.ledger.now()
        leases = set(farm.ledger.lease_ends())
        starts = sorted(farm.ledger.starts(tuple(leases)).items(), key=lambda item: -item[1])
        begun = [episode for episode, _ in starts[:_RUNNING_ROWS]]
        first = farm.ledger.open_episodes(limit=len(leases) + _QUEUED_ROWS)
        waiting = [episode for episode in first if episode not in leases][:_QUEUED_ROWS]
        rows = farm.ledger.rows([*begun, *waiting])
        stuck = self._stuck(reading)
        shown = {row.allocation_id for row in stuck}
        return Look(
            at=now,
            reading=reading,
            workers=tuple(farm.presence.workers_of(reading.slots)),
            leader=leader(farm.redis),
            open_count=farm.ledger.count_open(),
            running=tuple(row for row in rows if row.state is EpisodeState.RUNNING),
            queued=tuple(row for row in rows if row.state is EpisodeState.QUEUED),
            starts=tuple(start for _, start in starts),
            ended=self._ended(now),
            stuck=stuck,
            not_settled=tuple(item for item in farm.ledger.unresolved.items() if item.id not in shown),
        )

    def _ended(self, now: float) -> tuple[Ended, ...]:
        self._history.look(now)
        self._history.renew(self._farm.ledger.allocations.still_unsettled)
        return self._history.newest

    def _stuck(self, reading: FarmReading) -> tuple[Allocation, ...]:
        if not any(row.state.stuck for row in reading.running):
            return ()  # the common case: nothing that takes long with a thousand sandboxes
        return tuple(row for row in self._farm.ledger.allocations.unsettled() if row.state.stuck)
