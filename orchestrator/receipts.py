"""The farm's receipts, newest first, a page at a time: what listing, filtering and exporting read.

What always holds: no more than one page of receipts is in memory, however many there are; a receipt that expired
between the index and the look is passed over; what is written meanwhile is neither shown twice nor moves what is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

from pydantic import ValidationError
from redis import Redis

from orchestrator.allocations import Allocations
from orchestrator.errors import FarmError
from orchestrator.keys import Keys
from orchestrator.records import Receipt, SettledReceipt
from orchestrator.scripts import Scripts
from orchestrator.vocabulary import Outcome

logger = logging.getLogger(__name__)

_PAGE = 200
"""Receipts read at a time: some 400 KB of JSON, and a few milliseconds in which Redis serves nobody else."""
_GROUP_PAGES = 50
"""How far a look for any one receipt of a group goes, some half a second: groups have no index."""


@dataclass(frozen=True)
class ReceiptFilter:
    """Which receipts are wanted; None asks for nothing. Times are unix seconds at which receipts were written."""

    run_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    outcomes: frozenset[Outcome] | None = None
    scored: bool | None = None
    since: float | None = None
    until: float | None = None

    def takes(self, receipt: Receipt) -> bool:
        """Whether the receipt is wanted; its time is the index's business."""
        return (
            self.run_id in (None, receipt.run_id)
            and self.group_id in (None, receipt.group_id)
            and self.task_id in (None, receipt.task_id)
            and (self.outcomes is None or receipt.outcome in self.outcomes)
            and self.scored in (None, receipt.outcome.scored)
        )


class Receipts:
    """Reads receipts with their allocations as they stand."""

    def __init__(self, redis: Redis, allocations: Allocations) -> None:
        self._redis = redis
        self._scripts = Scripts(redis)
        self._allocations = allocations

    def select(self, wanted: ReceiptFilter, *, limit: int | None = None) -> Iterator[SettledReceipt]:
        """Those that are wanted, newest first, at most `limit`; an unreadable one is logged and passed over."""
        return islice((settled for page in self._pages(wanted) for settled in self._settled(page, wanted)), limit)

    def each(self, episode_ids: Sequence[str]) -> Iterator[SettledReceipt]:
        """Those of these episodes that have a receipt, in this order; two round trips a page."""
        for begin in range(0, len(episode_ids), _PAGE):
            yield from self._settled(list(episode_ids[begin : begin + _PAGE]), ReceiptFilter())

    def gone(self, episode_ids: Sequence[str]) -> set[str]:
        """Those of these episodes that have no receipt (any more): one count, and each by itself only if some are."""
        keys = [Keys.receipt(episode) for episode in episode_ids]
        if not keys or self._redis.exists(*keys) == len(set(keys)):
            return set()
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return {episode for episode, there in zip(episode_ids, pipeline.execute(), strict=True) if not there}

    def knows_run(self, run_id: str) -> bool:
        """Whether any episode of the run has ended within the retention time."""
        return bool(self._redis.exists(Keys.finished(run_id)))

    def count_of_run(self, run_id: str) -> int:
        """How many episodes of the run have a receipt now."""
        return int(self._scripts.run("count_receipts", [Keys.ends(run_id)], []))

    def knows_group(self, group_id: str, *, run_id: str | None = None) -> bool:
        """Whether an episode of the group is among the newest 10,000 that ended, or among as many of the run."""
        wanted = ReceiptFilter(run_id, group_id)
        pages = islice(self._pages(wanted), _GROUP_PAGES)
        return any(True for page in pages for _ in self._settled(page, wanted))

    def _pages(self, wanted: ReceiptFilter) -> Iterator[list[str]]:
        return self._of_all(wanted) if wanted.run_id is None else self._of_run(wanted.run_id, wanted)

    def _of_all(self, wanted: ReceiptFilter) -> Iterator[list[str]]:
        """Pages of episode ids from the index of all receipts.

        The place is the last score and how many of it were read: ranks would shift with each new receipt.
        """
        oldest = "-inf" if wanted.since is None else _ms(wanted.since)
        newest: str | int = "+inf" if wanted.until is None else _ms(wanted.until)
        skip = 0
        while page := cast(
            "list[tuple[str, float]]",
            self._redis.zrevrangebyscore(Keys.RECEIPTS, newest, oldest, skip, _PAGE, withscores=True),
        ):
            yield [episode for episode, _ in page]
            last = int(page[-1][1])
            again = sum(1 for _, score in page if int(score) == last)
            skip = skip + again if last == newest else again
            newest = last

    def _of_run(self, run_id: str, wanted: ReceiptFilter) -> Iterator[list[str]]:
        """The same from the stream of one run, whose ids are the times of writing."""
        oldest = "-" if wanted.since is None else str(_ms(wanted.since))
        newest = "+" if wanted.until is None else str(_ms(wanted.until))
        while page := cast(
            "list[tuple[str, dict[str, str]]]",
            self._redis.xrevrange(Keys.finished(run_id), newest, oldest, count=_PAGE),
        ):
            yield self._newest_of_each([(entry, fields["episode"]) for entry, fields in page])
            newest = f"({page[-1][0]}"

    def _newest_of_each(self, page: list[tuple[str, str]]) -> list[str]:
        """The episodes of these entries, less those whose receipt another entry announced.

        Their rows tell, so that no list of what was seen has to be kept; older versions noted no entry there.
        """
        pipeline = self._redis.pipeline(transaction=False)
        for _, episode in page:
            pipeline.hget(Keys.episode(episode), "entry")
        own = pipeline.execute()
        return [episode for (entry, episode), known in zip(page, own, strict=True) if known in (None, entry)]

    def _settled(self, episodes: list[str], wanted: ReceiptFilter) -> Iterator[SettledReceipt]:
        texts = cast("list[str | None]", self._redis.mget([Keys.receipt(episode) for episode in episodes]))
        receipts = [
            receipt
            for episode, text in zip(episodes, texts, strict=True)
            if text is not None and (receipt := _read(episode, text)) is not None and wanted.takes(receipt)
        ]
        rows = iter(self._allocations.each([name for receipt in receipts for name in receipt.allocations]))
        for receipt in receipts:
            own = tuple(islice(rows, len(receipt.allocations)))
            yield SettledReceipt(receipt=receipt, allocations=tuple(row for row in own if row is not None))


def read_receipt(text: str) -> Receipt:
    """A stored receipt; raises FarmError when a newer version wrote it."""
    try:
        return Receipt.model_validate_json(text)
    except ValidationError as error:
        raise FarmError(f"a receipt that this version cannot read: {error.errors()[0]['msg']}; upgrade") from None


def _read(episode_id: str, text: str) -> Receipt | None:
    try:
        return read_receipt(text)
    except FarmError as error:  # one that cannot be read must not keep a hundred thousand others from being read
        logger.warning("left out: %s: %s", episode_id, error)
        return None


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
