"""What was spent, summed up over receipts and what runs now: the truth behind `rollout-farm cost`.

What always holds: every sandbox of every episode counts once, whether it is settled or accrues still; sums are whole
pico-dollars and milliseconds; receipts are read a page at a time, and only the sums are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator.allocations import Allocations, Running
from orchestrator.cost import By
from orchestrator.ledger import Ledger
from orchestrator.receipts import ReceiptFilter, Receipts
from orchestrator.records import Allocation, Receipt, SettledReceipt
from orchestrator.rows import EpisodeRow
from orchestrator.vocabulary import AllocationState, EpisodeState, Phase, Role

NO_GROUP = "-"
"""The key of episodes without a group."""


@dataclass(frozen=True)
class Bill:
    """A sum. Waiting is the part of the policy sandboxes' time, and of the money, that went by without a command."""

    episodes: int = 0
    sandboxes: int = 0
    open_sandboxes: int = 0
    """Of those, how many accrue still."""
    running_ms: int = 0
    waiting_ms: int = 0
    cost_picousd: int = 0
    waiting_picousd: int = 0

    def __add__(self, other: Bill) -> Bill:
        return Bill(*(getattr(self, name) + getattr(other, name) for name in Bill.__dataclass_fields__))


@dataclass(frozen=True)
class _Item:
    """What one episode adds to one line of the bill."""

    key: str
    bill: Bill


class Spending:
    """Sums up; what runs still is priced as it will be when it is settled."""

    def __init__(self, ledger: Ledger, receipts: Receipts) -> None:
        self._ledger = ledger
        self._receipts = receipts

    def bills(self, by: By, wanted: ReceiptFilter) -> tuple[dict[str, Bill], Bill]:
        """Sums by key, largest cost first (days in order), and the total over all.

        A receipt belongs to the day on which its episode ended (UTC), an open episode to today and to the outcome
        `open`; open episodes count unless the filter has an end or asks for something that only a receipt has.
        """
        sums: dict[str, Bill] = {}
        total = Bill()
        for episode in self._episodes(wanted):
            lines = list(episode.lines(by))
            for line in lines:
                sums[line.key] = sums.get(line.key, Bill()) + line.bill
            total += whole(line.bill for line in lines)
        in_order = sorted(sums.items(), key=lambda line: line[0] if by is By.DAY else (-line[1].cost_picousd, line[0]))
        return dict(in_order), total

    def _episodes(self, wanted: ReceiptFilter) -> Iterator[_Episode]:
        """Open ones first: one that ends meanwhile is then passed over among the receipts, not counted twice."""
        now = self._ledger.now()
        seen = set()
        if wanted.until is None and wanted.outcomes is None and wanted.scored is None:
            for open_row in self._ledger.open_rows():
                if open_row.state is not EpisodeState.RUNNING:
                    continue  # it has no sandbox; there may be a hundred thousand of them
                row = self._ledger.row(open_row.episode_id)
                if row is None or row.outcome is not None or not _takes(wanted, row):
                    continue
                seen.add(row.episode_id)
                yield self._open_episode(row, now)
        for settled in self._receipts.select(wanted):
            if settled.receipt.episode_id not in seen:
                yield _Episode(_keys(settled.receipt), self._sandboxes(settled.allocations, now), waiting_ms(settled))

    def _open_episode(self, row: EpisodeRow, now: float) -> _Episode:
        allocations = self._ledger.allocations
        found = allocations.each(self._ledger.allocation_ids(row.episode_id))
        keys = {
            By.TASK: row.task_id,
            By.OUTCOME: "open",
            By.DAY: _day(now),
            By.RUN: row.run_id,
            By.GROUP: row.group_id or NO_GROUP,
            By.EPISODE: row.episode_id,
        }
        return _Episode(keys, self._sandboxes((each for each in found if each is not None), now), 0)

    def _sandboxes(self, rows: Iterable[Allocation], now: float) -> tuple[_Sandbox, ...]:
        return tuple(
            _Sandbox(row.role, running_ms(row, now), cost, row.state)
            for row in rows
            if (cost := cost_so_far(self._ledger.allocations, row, now)) is not None
        )


@dataclass(frozen=True)
class _Sandbox:
    role: Role
    running_ms: int
    picousd: int
    state: AllocationState


@dataclass(frozen=True)
class _Episode:
    """What a bill needs to know of one episode."""

    keys: dict[By, str]
    sandboxes: tuple[_Sandbox, ...]
    waiting_ms: int

    def lines(self, by: By) -> Iterator[_Item]:
        if by is not By.ROLE:
            yield _Item(self.keys[by], whole(self._bill(sandbox) for sandbox in self.sandboxes))
            return
        for role in Role:
            bills = [self._bill(sandbox) for sandbox in self.sandboxes if sandbox.role is role]
            if bills:
                yield _Item(role, whole(bills))

    def _bill(self, sandbox: _Sandbox) -> Bill:
        waiting = min(self.waiting_ms, sandbox.running_ms) if sandbox.role is Role.POLICY else 0
        return Bill(
            episodes=1,
            sandboxes=1,
            open_sandboxes=int(sandbox.state.accrues),
            running_ms=sandbox.running_ms,
            waiting_ms=waiting,
            cost_picousd=sandbox.picousd,
            waiting_picousd=sandbox.picousd * waiting // max(1, sandbox.running_ms),
        )


def whole(bills: Iterable[Bill]) -> Bill:
    """One episode's sum of its sandboxes; an episode without any is one too."""
    total = Bill()
    for bill in bills:
        total += bill
    return Bill(**{**vars(total), "episodes": 1})


def cost_so_far(allocations: Allocations, row: Allocation, now: float) -> int | None:
    """What a sandbox has cost by `now`, in pico-dollars; None for one that costs nothing (yet)."""
    if row.cost_picousd is not None or not row.state.accrues:
        return row.cost_picousd
    return allocations.cost_of(row, running_ms(row, now))


def running_ms(row: Allocation, now: float) -> int:
    """How long a sandbox has run by `now`: no longer than it can live."""
    if row.running_seconds is not None:
        return round(1000 * row.running_seconds)
    if row.created_at is None or not row.state.accrues:
        return 0
    longest = now - row.created_at if row.longest_seconds is None else row.longest_seconds
    return max(0, int(1000 * min(now - row.created_at, longest)))


def burn_picousd_per_hour(running: Iterable[Running]) -> int:
    """What the sandboxes that may run now cost in an hour."""
    return sum(row.picousd_per_hour for row in running if row.state.accrues)


def waiting_ms(settled: SettledReceipt) -> int:
    """How long the policy's window was open without a command running: the model was thinking, or the trainer busy."""
    receipt = settled.receipt
    acting = sum(step.seconds for step in receipt.operations if step.name == "terminal")
    return max(0, round(1000 * (receipt.phases.get(Phase.POLICY, 0.0) - acting)))


def _keys(receipt: Receipt) -> dict[By, str]:
    return {
        By.TASK: receipt.task_id,
        By.OUTCOME: str(receipt.outcome),
        By.DAY: _day(receipt.finished_at),
        By.RUN: receipt.run_id,
        By.GROUP: receipt.group_id or NO_GROUP,
        By.EPISODE: receipt.episode_id,
    }


def _takes(wanted: ReceiptFilter, row: EpisodeRow) -> bool:
    return (
        wanted.run_id in (None, row.run_id)
        and wanted.group_id in (None, row.group_id)
        and wanted.task_id in (None, row.task_id)
    )


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
