"""Episode rows, their leases and their receipts.

What always holds: a row is open before its job exists; only the holder of a row's newest token writes; a receipt is
written once, and one with a score only when no allocation of its episode is unsettled.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from redis import Redis

from orchestrator.allocations import Allocations
from orchestrator.counts import cost_bounds, counts_of
from orchestrator.errors import FarmError, LeaseLost
from orchestrator.keys import Keys
from orchestrator.mailbox import ENDED_SECONDS, PARTS
from orchestrator.receipts import read_receipt
from orchestrator.records import EpisodeSpec, Receipt, SettledReceipt
from orchestrator.rows import EpisodeRow, Lease, OpenEpisode, Progress
from orchestrator.scripts import Scripts
from orchestrator.settings import DEFAULT_QUEUE
from orchestrator.unresolved import Unresolved
from orchestrator.vocabulary import EpisodeState, Outcome, Role, job_id


class Ledger:
    """Reads and writes rows, leases and receipts; `allocations` is its part about sandboxes.

    `queue` names where the jobs of the episodes go that are opened here. A simulation gives it a clock, in ms.
    """

    def __init__(
        self,
        redis: Redis,
        allocations: Allocations,
        *,
        retention_seconds: int,
        queue: str = DEFAULT_QUEUE,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        self.allocations = allocations
        self.unresolved = Unresolved(redis)
        self._redis = redis
        self._scripts = Scripts(redis, clock_ms=clock_ms)
        self._retention = retention_seconds
        self._queue = queue

    def farm_tag(self) -> str:
        """The farm's random tag: made by whoever asks first, then the same for ever."""
        tag = self._redis.get(Keys.TAG)
        if tag is None:
            self._redis.set(Keys.TAG, _new_tag(), nx=True)
            tag = self._redis.get(Keys.TAG)
        return cast(str, tag)

    def known_farm_tag(self) -> str | None:
        """The farm's tag, or None when nobody has asked for one yet: then no sandbox carries it."""
        return cast("str | None", self._redis.get(Keys.TAG))

    def open(self, spec: EpisodeSpec) -> bool:
        """Open the episode's row; False when it was open (or finished) already.

        Once its receipt is gone, the same id is a new episode, which finds nothing of the old one.
        """
        keys = [
            Keys.episode(spec.episode_id),
            Keys.OPEN,
            Keys.attempt(spec.episode_id),
            Keys.transcript(spec.episode_id),
            *(Keys.mailbox(spec.episode_id, part) for part in PARTS),
        ]
        args: list[str | int | float] = [
            spec.episode_id,
            job_id(spec.episode_id, ""),
            spec.model_dump_json(),
            spec.run_id,
            spec.group_id or "",
            spec.trainer_id or "",
            self._queue,
            spec.template,
            *(spec.budgets.longest_seconds(role) for role in Role),
            spec.reservation_id or "",
            _ms(spec.budgets.together_seconds),
        ]
        return bool(self._scripts.run("open_episode", keys, args))

    def take(self, episode_id: str, attempt: int, owner: str, *, lease_seconds: float) -> Lease | None:
        """Take a queued episode for this attempt; None when the row says that it is not ours to take."""
        keys = [Keys.episode(episode_id), Keys.LEASES, Keys.TOKEN, Keys.TAG]
        args: list[str | int | float] = [episode_id, job_id(episode_id, attempt), owner, _ms(lease_seconds), _new_tag()]
        asked = time.monotonic()
        answer = self._scripts.run("take_lease", keys, args)
        if not answer[0]:
            return None
        token, queued, taken, tag, cancelled = answer
        queued_at, taken_at = int(queued) / 1000, int(taken) / 1000
        return Lease(episode_id, attempt, str(token), queued_at, taken_at, tag, bool(cancelled), asked)

    def renew(self, lease: Lease, *, lease_seconds: float) -> bool:
        """Prolong the lease; False when it is no longer ours."""
        keys = [Keys.episode(lease.episode_id), Keys.LEASES]
        return bool(self._scripts.run("renew_lease", keys, [lease.episode_id, lease.token, _ms(lease_seconds)]))

    def seize(self, episode_id: str, owner: str, *, lease_seconds: float) -> str | None:
        """Take over a running episode whose lease has run out; the new token, or None when it still holds."""
        keys = [Keys.episode(episode_id), Keys.LEASES, Keys.TOKEN]
        token = self._scripts.run("seize_lease", keys, [episode_id, owner, _ms(lease_seconds)])
        return str(token) if token else None

    def shorten_leases(self, *, lease_seconds: float) -> int:
        """Let no lease last longer than it was given for: of those of before a step back of the clock; how many.

        `lease_seconds` is for rows that do not say.
        """
        return int(self._scripts.run("shorten_leases", [Keys.LEASES], [Keys.episode(""), _ms(lease_seconds)]))

    def defer(self, lease: Lease) -> bool:
        """Give an episode back to the queue under its next attempt; False when it is not ours to give."""
        keys = [Keys.episode(lease.episode_id), Keys.LEASES]
        args: list[str | int | float] = [
            lease.episode_id,
            lease.token,
            job_id(lease.episode_id, lease.attempt + 1),
        ]
        return bool(self._scripts.run("defer_episode", keys, args))

    def commit(self, receipt: Receipt, token: str) -> None:
        """Write the episode's one receipt.

        Raises LeaseLost when the token no longer owns it, FarmError for a score while an allocation is unsettled.
        """
        text = receipt.model_dump_json()
        keys = [
            Keys.episode(receipt.episode_id),
            Keys.OPEN,
            Keys.LEASES,
            Keys.receipt(receipt.episode_id),
            Keys.RECEIPTS,
            Keys.finished(receipt.run_id),
            Keys.COUNTERS,
            Keys.PERMITS,
            Keys.WAITERS,
            Keys.WAITERS_SEEN,
            Keys.PLACES,
            Keys.LIMITS,
            Keys.CREATORS,
            Keys.CREATORS_DUE,
            Keys.BUDGET,
            Keys.BATCHES,
            Keys.STEPPED_BACK,
            Keys.ENDS,
            Keys.ends(receipt.run_id),
            Keys.transcript(receipt.episode_id),
            Keys.attempt(receipt.episode_id),
            *(Keys.mailbox(receipt.episode_id, part) for part in PARTS),
        ]
        answer = self._scripts.run(
            "commit_receipt",
            keys,
            [
                receipt.episode_id,
                token,
                text,
                receipt.outcome,
                int(receipt.outcome.scored),
                self._retention,
                Keys.WAKE_PREFIX,
                json.dumps(counts_of(receipt)),
                json.dumps(cost_bounds()),
                Keys.BUDGET_PREFIX,
                Keys.allocation(""),
                ENDED_SECONDS,
            ],
        )
        if answer == 0:
            raise LeaseLost(f"{receipt.episode_id}: token {token} may no longer write; its owner finishes it")
        if answer == -1:
            raise FarmError(f"{receipt.episode_id}: {receipt.outcome} needs every sandbox confirmed absent first")

    def receipt(self, episode_id: str) -> SettledReceipt | None:
        """The episode's receipt with its allocations as they stand, or None while it has none.

        Raises FarmError for one that a newer version wrote.
        """
        text = self._redis.get(Keys.receipt(episode_id))
        if text is None:
            return None
        receipt = read_receipt(cast(str, text))
        rows = self.allocations.each(receipt.allocations)
        return SettledReceipt(receipt=receipt, allocations=tuple(row for row in rows if row is not None))

    def cancel(self, episode_id: str) -> EpisodeState | None:
        """Ask for an end: whoever runs the episode, or takes it, ends it as cancelled at the next look.

        The state in which it was found; None when there is no such episode.
        """
        state = self._scripts.run("cancel_episode", [Keys.episode(episode_id), Keys.wake(episode_id)], [])
        return EpisodeState(state) if state else None

    def cancelled(self, episode_id: str) -> bool:
        """Whether somebody asked for the episode's end."""
        return bool(self._redis.hexists(Keys.episode(episode_id), "cancel"))

    def knows(self, episode_id: str) -> bool:
        """Whether there is a row or a receipt of this episode."""
        return not self.strangers([episode_id])

    def strangers(self, episode_ids: Iterable[str]) -> list[str]:
        """Those of these episodes that have neither row nor receipt; a round trip for each thousand."""
        return [episode for episode, state, receipt in self._standing(episode_ids) if state is None and not receipt]

    def forgotten(self, episode_ids: Iterable[str]) -> list[str]:
        """Those that have no receipt and never will: strangers, and what ended so long ago that its receipt is gone.

        The row of such a one may still stand for a sandbox that nobody could settle.
        """
        over = (None, EpisodeState.FINAL)
        return [episode for episode, state, receipt in self._standing(episode_ids) if state in over and not receipt]

    def _standing(self, episode_ids: Iterable[str]) -> Iterator[tuple[str, str | None, bool]]:
        """Each with its row's state and whether there is a receipt, looked at in this order: an end writes both."""
        for some in _in_parts(list(episode_ids)):
            pipeline = self._redis.pipeline(transaction=False)
            for episode in some:
                pipeline.hget(Keys.episode(episode), "state")
                pipeline.exists(Keys.receipt(episode))
            answers = iter(pipeline.execute())
            yield from ((episode, next(answers), bool(next(answers))) for episode in some)

    def count_lost_job(self, episode_id: str, *, counted: int) -> int:
        """Count that the episode's job vanished before its lease was taken; how often by now.

        `counted` is what its row said before: whoever says the same again, or too late, counts nothing.
        """
        return int(self._scripts.run("count_lost_job", [Keys.episode(episode_id)], [counted]))

    def row(self, episode_id: str) -> EpisodeRow | None:
        """The episode's row, or None when there is none (any more)."""
        return _row(episode_id, cast("dict[str, str]", self._redis.hgetall(Keys.episode(episode_id))))

    def rows(self, episode_ids: Sequence[str]) -> list[EpisodeRow]:
        """The rows of these episodes, in this order, in one round trip; one that is not there is left out."""
        pipeline = self._redis.pipeline(transaction=False)
        for episode in episode_ids:
            pipeline.hgetall(Keys.episode(episode))
        found = zip(episode_ids, pipeline.execute() if episode_ids else [], strict=True)
        return [row for episode, raw in found if (row := _row(episode, raw)) is not None]

    def state(self, episode_id: str) -> EpisodeState | None:
        """Where the episode's row stands, or None when there is none (any more)."""
        state = self._redis.hget(Keys.episode(episode_id), "state")
        return EpisodeState(cast(str, state)) if state else None

    def allocation_ids(self, episode_id: str) -> tuple[str, ...]:
        """Every allocation that the episode ever intended, in order."""
        listed = self._redis.hget(Keys.episode(episode_id), "allocations")
        return tuple(cast(str, listed).split(",")) if listed else ()

    def progress(self, episode_ids: Sequence[str]) -> list[Progress | None]:
        """How far these episodes are from being over, in this order, in one round trip; None for one without a row."""
        pipeline = self._redis.pipeline(transaction=False)
        for episode in episode_ids:
            pipeline.hmget(Keys.episode(episode), ["outcome", "allocations", "unsettled"])
        return [_progress(*found) for found in (pipeline.execute() if episode_ids else [])]

    def open_episodes(self, *, limit: int | None = None) -> list[str]:
        """Ids of episodes without a receipt, oldest first, at most `limit`."""
        return cast("list[str]", self._redis.zrange(Keys.OPEN, 0, -1 if limit is None else limit - 1))

    def count_open(self) -> int:
        """How many episodes have no receipt."""
        return int(self._redis.zcard(Keys.OPEN))

    def starts(self, episode_ids: Sequence[str]) -> dict[str, float]:
        """When those of these episodes began that have, in unix seconds; one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        for episode in episode_ids:
            pipeline.hget(Keys.episode(episode), "started_at")
        found = zip(episode_ids, pipeline.execute() if episode_ids else [], strict=True)
        return {episode: int(ms) / 1000 for episode, ms in found if ms}

    def open_rows(self) -> list[OpenEpisode]:
        """Every open row in short, oldest first, in two round trips: their ids, then the rows."""
        episodes = self.open_episodes()
        pipeline = self._redis.pipeline(transaction=False)
        for episode in episodes:
            pipeline.hmget(Keys.episode(episode), _IN_SHORT)
        found = zip(episodes, pipeline.execute(), strict=True)
        return [_in_short(episode, *fields) for episode, fields in found if fields[0]]

    def lease_ends(self) -> dict[str, float]:
        """When each leased episode's lease runs out, in unix seconds of Redis."""
        rows = cast("list[tuple[str, float]]", self._redis.zrange(Keys.LEASES, 0, -1, withscores=True))
        return {episode: score / 1000 for episode, score in rows}

    def now(self) -> float:
        """Redis's time in unix seconds: the only clock that rows are compared with."""
        seconds, micros = self._redis.time()
        return seconds + micros / 1_000_000


_IN_SHORT = ["state", "job", "run", "group", "trainer", "cancel", "queue", "lost_jobs", "batch", "together_ms"]


def _in_short(episode_id: str, state: str, job: str, *rest: str | None) -> OpenEpisode:
    run, group, trainer, cancel, queue, lost, batch, together = rest
    return OpenEpisode(
        episode_id,
        EpisodeState(state),
        job,
        run or "",
        group or "",
        trainer or "",
        bool(cancel),
        queue or "",
        int(lost or 0),
        batch or "",
        int(together or 0) / 1000,
    )


def _row(episode_id: str, raw: dict[str, str]) -> EpisodeRow | None:
    if "state" not in raw:
        return None
    return EpisodeRow(
        episode_id=episode_id,
        state=EpisodeState(raw["state"]),
        attempt=int(raw["attempt"]),
        job_id=raw["job"],
        run_id=raw["run"],
        group_id=raw.get("group", ""),
        trainer_id=raw.get("trainer", ""),
        queue=raw.get("queue", ""),
        spec_text=raw["spec"],
        queued_at=int(raw["queued_at"]) / 1000,
        started_at=int(raw["started_at"]) / 1000 if "started_at" in raw else None,
        unsettled=int(raw["unsettled"]),
        lost_jobs=int(raw.get("lost_jobs", 0)),
        outcome=Outcome(raw["outcome"]) if "outcome" in raw else None,
    )


def _in_parts(rows: list[str], size: int = 1000) -> Iterator[list[str]]:
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


def _progress(outcome: str | None, allocations: str | None, unsettled: str | None) -> Progress | None:
    if unsettled is None:
        return None
    listed = allocations.split(",") if allocations and int(unsettled) > 0 else ()
    return Progress(None if outcome is None else Outcome(outcome), tuple(listed))


def _new_tag() -> str:
    return secrets.token_hex(8)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
