"""What ended lately: a bounded ring filled from receipts, and its points counted into buckets of time for the charts.

What always holds: the receipts are the truth, so a restart loses nothing of it and shows nothing else; no more than
RING episodes are kept; once it is filled, a look reads only what was written since the last one, and what takes the
place of receipts that have ended. The counting is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice

from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import SettledReceipt
from orchestrator.vocabulary import Outcome

RING = 2000
"""Episodes kept: some 2 MB, and half a second to read them at the first look."""
_OVERLAP_SECONDS = 5.0
"""How far a look reads back behind the last one: receipts of one moment are not all seen at once."""
_DETAIL_CHARACTERS = 300

WINDOWS = {"5 min": 300, "15 min": 900, "1 h": 3_600, "6 h": 21_600, "24 h": 86_400}
"""What the charts can span, in seconds."""
_TYPICAL = 100
"""The charts span the newest so many episodes, unless a window is chosen."""
BUCKETS = 60


@dataclass(frozen=True)
class Ended:
    """One ended episode, as much of it as tables and charts show. Times are unix seconds."""

    episode_id: str
    run_id: str
    task_id: str
    outcome: Outcome
    reward: float | None
    detail: str
    queued_at: float
    started_at: float | None
    finished_at: float
    phases: Mapping[str, float]
    cost_picousd: int
    unsettled: tuple[str, ...] = ()
    """Those of its sandboxes that are not settled; without any nothing here changes any more."""

    @property
    def settled(self) -> bool:
        """Whether each of its sandboxes is."""
        return not self.unsettled


class History:
    """The ring; not for two threads at once."""

    def __init__(self, receipts: Receipts) -> None:
        self._receipts = receipts
        self._known: dict[str, Ended] = {}
        self._looked_at: float | None = None

    @property
    def newest(self) -> tuple[Ended, ...]:
        """Everything in the ring, newest first."""
        return tuple(self._known.values())

    def look(self, now: float) -> None:
        """Take in what was written since the last look, and drop what has no receipt any more.

        Receipts end, and a Redis can be emptied. `now` is Redis's time in unix seconds. Raises RedisError.
        """
        if self._looked_at is not None and self._looked_at > now:
            self._looked_at = None  # the clock stepped back: what was written since is older than the last look
        since = None if self._looked_at is None else self._looked_at - _OVERLAP_SECONDS
        found = [ended_of(settled) for settled in self._receipts.select(ReceiptFilter(since=since), limit=RING)]
        self._looked_at = now
        self._take(found)
        self._drop(self._receipts.gone(list(self._known)))

    def _take(self, found: Iterable[Ended]) -> None:
        fresh = {ended.episode_id: ended for ended in found}
        older = (ended for name, ended in self._known.items() if name not in fresh)
        newest = sorted((*fresh.values(), *older), key=lambda ended: -ended.finished_at)[:RING]
        self._known = {ended.episode_id: ended for ended in newest}

    def _drop(self, gone: Set[str]) -> None:
        """Into the places of a full ring come older ones again, of processes that keep their receipts for longer."""
        if not gone:
            return
        oldest, full = min(ended.finished_at for ended in self._known.values()), len(self._known) == RING
        for name in gone:
            del self._known[name]
        if full:
            before = self._receipts.select(ReceiptFilter(until=oldest + _OVERLAP_SECONDS))
            new = (ended_of(settled) for settled in before if settled.receipt.episode_id not in self._known)
            self._take(list(islice(new, len(gone))))

    def renew(self, unsettled: Callable[[Sequence[str]], Set[str]]) -> None:
        """Read the episodes again of which a sandbox was settled late; `unsettled` tells which are not.

        However many there are: one that is left out would show too small a cost for ever. Raises RedisError.
        """
        owners = {name: one.episode_id for one in self._known.values() for name in one.unsettled}
        open_still = unsettled(list(owners)) if owners else set()
        late = list(dict.fromkeys(episode for name, episode in owners.items() if name not in open_still))
        found = {settled.receipt.episode_id: ended_of(settled) for settled in self._receipts.each(late)}
        for episode in late:  # a receipt that has expired meanwhile is not asked for again
            self._known[episode] = found.get(episode, replace(self._known[episode], unsettled=()))


def ended_of(settled: SettledReceipt) -> Ended:
    """A receipt in short."""
    receipt = settled.receipt
    return Ended(
        episode_id=receipt.episode_id,
        run_id=receipt.run_id,
        task_id=receipt.task_id,
        outcome=receipt.outcome,
        reward=receipt.reward,
        detail=(receipt.detail or "")[:_DETAIL_CHARACTERS],
        queued_at=receipt.queued_at,
        started_at=receipt.started_at,
        finished_at=receipt.finished_at,
        phases=receipt.phases,
        cost_picousd=settled.cost_picousd,
        unsettled=tuple(row.allocation_id for row in settled.allocations if not row.state.settled),
    )


@dataclass
class Bucket:
    """What ended within one stretch of time."""

    solved: int = 0
    unsolved: int = 0
    """Scored 0."""
    aborted: int = 0
    rewards: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    cost_picousd: int = 0
    running: float = 0.0
    """Episodes that were in a slot, on average."""

    @property
    def mean_reward(self) -> float | None:
        """Of the scored ones; None without any."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def mean_phase(self, phase: str) -> float:
        """Seconds on average; 0 when it did not occur."""
        took = self.phases.get(phase, ())
        return sum(took) / len(took) if took else 0.0


@dataclass(frozen=True)
class Series:
    """A window of time in BUCKETS equal stretches, oldest first."""

    window_seconds: int
    buckets: tuple[Bucket, ...]

    @property
    def bucket_seconds(self) -> float:
        """Length of a stretch."""
        return self.window_seconds / BUCKETS


def window_of(ended: Sequence[Ended], now: float) -> int:
    """The smallest window that holds the newest hundred episodes; `ended` is newest first."""
    recent = [one for one in ended[:_TYPICAL] if now - one.finished_at < max(WINDOWS.values())]
    span = now - (recent[-1].started_at or recent[-1].finished_at) if recent else 0.0
    return next((seconds for seconds in WINDOWS.values() if seconds >= span), max(WINDOWS.values()))


def gap_before(ended: Sequence[Ended], now: float, window_seconds: int) -> float | None:
    """Up to when, in unix seconds, the window lacks episodes that the ring has dropped; None when it lacks none."""
    if len(ended) < RING or ended[-1].finished_at <= now - window_seconds:
        return None
    return ended[-1].finished_at


def series(ended: Iterable[Ended], starts: Iterable[float], now: float, window_seconds: int) -> Series:
    """Count what ended within the window; `starts` are those of the episodes that run still."""
    begin, width = now - window_seconds, window_seconds / BUCKETS
    buckets = tuple(Bucket() for _ in range(BUCKETS))
    for one in ended:
        if one.started_at is not None and one.finished_at > begin:
            _spread(buckets, one.started_at - begin, one.finished_at - begin, width)
        place = int((one.finished_at - begin) / width)
        if one.finished_at >= begin:
            _count(buckets[min(place, BUCKETS - 1)], one)  # clocks of hosts differ a little
    for start in starts:
        _spread(buckets, start - begin, float(window_seconds), width)
    return Series(window_seconds, buckets)


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The quantile of at least one value that is one of them."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def _count(bucket: Bucket, one: Ended) -> None:
    if one.reward is None:
        bucket.aborted += 1
    else:
        bucket.rewards.append(one.reward)
        bucket.solved += one.outcome is Outcome.SOLVED
        bucket.unsolved += one.outcome is not Outcome.SOLVED
    for phase, seconds in one.phases.items():
        bucket.phases.setdefault(phase, []).append(seconds)
    bucket.cost_picousd += one.cost_picousd


def _spread(buckets: Sequence[Bucket], start: float, end: float, width: float) -> None:
    """Add one episode's time from `start` to `end`, in seconds after the window's begin."""
    first, last = max(0, int(start / width)), min(len(buckets) - 1, int(end / width))
    for place in range(first, last + 1):
        overlap = min(end, (place + 1) * width) - max(start, place * width)
        buckets[place].running += max(0.0, overlap) / width
