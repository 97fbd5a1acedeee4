"""The farm at a glance, for people: facts as labelled lines, and the same as a board that is drawn again and again.

Pure; a reading in, lines or a renderable out. Whatever a sandbox or another host wrote is shown as text that steers
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from deploy.terminal import safe
from deploy.timestamps import show_moment
from orchestrator.cost import usd
from orchestrator.limiter import LimiterReading
from orchestrator.records import SettledReceipt
from orchestrator.status import Status

_UNRESOLVED = "UNRESOLVED"

_MOST_UNRESOLVED = 4
"""Lines of a board; a provider that is away leaves hundreds."""

_FEWEST_OUTCOMES = 3

_COLUMNS = ("finished (UTC)", "episode", "task", "outcome", "reward", "USD")

_DISPENSABLE = ("USD", "task", "finished (UTC)", "episode")
"""What a narrow window does without, first to last."""


@dataclass(frozen=True)
class Fact:
    """One line: what it is about, and what is so."""

    label: str
    text: str
    alarm: bool = False

    def line(self) -> str:
        """As plain text."""
        return safe(f"{self.label:<11} {self.text}" if self.label else self.text, multiline=False)


@dataclass(frozen=True)
class Board:
    """One look at everything that is watched."""

    status: Status
    limits: LimiterReading
    last: Sequence[SettledReceipt]
    """The newest receipts, newest first."""
    at: float
    """Unix seconds of Redis."""
    trouble: str = ""
    """Why this is not the newest look."""


def facts_of(reading: Status) -> list[Fact]:
    """What `rollout-farm status` says: first what is wrong."""
    workers = [Fact("worker", f"{row.worker_id} on {row.host}, pid {row.pid}, {row.state}") for row in reading.workers]
    return [*_alarms(reading), *_summary(reading), *workers]


def _alarms(reading: Status) -> list[Fact]:
    facts = [
        Fact(
            _UNRESOLVED,
            f"{row.allocation_id}: sandbox {row.sandbox_id or 'not named'}, {row.state}: {row.detail or ''}",
            alarm=True,
        )
        for row in reading.unresolved
    ]
    facts += [
        Fact(_UNRESOLVED, f"{item.kind} {item.id}, since {show_moment(item.since)}: {item.reason}", alarm=True)
        for item in reading.not_settled
    ]
    if reading.leader is None:
        left = "nobody leads the reconcilers, what killed workers leave stays: start one with rollout-farm orchestrator"
        facts.append(Fact("", left, alarm=True))
    if not reading.workers:
        facts.append(
            Fact("", "no worker is alive: start some with rollout-farm worker, or rollout-farm up", alarm=True)
        )
    return facts


def _summary(reading: Status) -> list[Fact]:
    capacity = reading.capacity
    hosts = len({row.host for row in reading.workers})
    where = f" on {hosts} host{'s' if hosts > 1 else ''}" if hosts else ""
    busy = min(reading.running_episodes, capacity.live_slots)
    orphans = f"; orphans deleted so far: {reading.orphans_deleted}" if reading.orphans_deleted else ""
    reconciler = f"{reading.leader or 'NONE'}, last round {show_moment(reading.reconciled_at)}{orphans}"
    return [
        Fact("workers", f"{len(reading.workers)}{where} ({capacity.live_slots} live slots, {busy} busy)"),
        Fact(
            "capacity",
            f"{capacity.free} free; limit {capacity.concurrency_limit}, {capacity.permits} admitted, "
            f"{capacity.reserved} reserved",
        ),
        Fact(
            "queue",
            f"{reading.queued_jobs} jobs; {reading.open_episodes} open episodes, {reading.running_episodes} running",
        ),
        Fact("outcomes", ", ".join(f"{name} {count}" for name, count in reading.outcomes.items()) or "none yet"),
        _spending(reading),
        Fact("reconciler", reconciler, alarm=reading.leader is None),
    ]


def board_lines(board: Board) -> list[str]:
    """A board as plain text."""
    heading = Fact("at", f"{show_moment(board.at)} UTC")
    return [fact.line() for fact in (heading, *_board_facts(board))] + [
        Fact("ended", "  ".join(cells)).line() for cells in _last(board)
    ]


def draw(board: Board) -> RenderableType:
    """A board for a terminal, made to fit it: what is wrong, the limits, then as many last outcomes as there is room.

    Workers are one line: sixteen of them would push everything else out of a window.
    """
    return _Drawn(board)


@dataclass(frozen=True)
class _Drawn:
    board: Board

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = Group(
            Text(f"rollout-farm, {show_moment(self.board.at)} UTC; Ctrl-C ends this view", style="dim"), self._grid()
        )
        yield head
        taken = len(console.render_lines(head, options.update(height=None), pad=False)) + 2  # a title and a header
        yield self._ended(max(_FEWEST_OUTCOMES, options.max_height - taken), options.max_width)

    def _grid(self) -> Table:
        board = self.board
        alarms = _alarms(board.status)
        stuck = [fact for fact in alarms if fact.label == _UNRESOLVED]
        others = [fact for fact in alarms if fact.label != _UNRESOLVED]
        if len(stuck) > _MOST_UNRESOLVED:
            hidden = len(stuck) - _MOST_UNRESOLVED + 1
            more = Fact(_UNRESOLVED, f"and {hidden} more: rollout-farm status shows all", alarm=True)
            stuck = [*stuck[: _MOST_UNRESOLVED - 1], more]
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        for fact in (*_trouble(board), *stuck, *others, *_limits(board), *_summary(board.status)):
            text = Text(safe(fact.text, multiline=False), style="red" if fact.alarm else "")
            if fact.label == _UNRESOLVED:
                text.no_wrap, text.overflow = True, "ellipsis"  # its id comes first; a reason may be a page
            grid.add_row(fact.label, text)
        return grid

    def _ended(self, room: int, width: int) -> Table:
        rows = [dict(zip(_COLUMNS, map(_shown, cells), strict=True)) for cells in _last(self.board)[:room]]
        widths = {name: max([len(name), *(len(row[name]) for row in rows)]) + 2 for name in _COLUMNS}
        wanted = list(_COLUMNS)
        for name in _DISPENSABLE:  # a column less is better than all of them cut
            if sum(widths[name] for name in wanted) > width + 2:
                wanted.remove(name)
        ended = Table(title="last outcomes", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        for name in wanted:
            ended.add_column(name, no_wrap=True)
        for row in rows:
            ended.add_row(*(Text(row[name]) for name in wanted))
        return ended


def _shown(cell: str) -> str:
    return safe(cell, multiline=False)


def _board_facts(board: Board) -> list[Fact]:
    return [*_trouble(board), *facts_of(board.status), *_limits(board)]


def _trouble(board: Board) -> list[Fact]:
    return [Fact("TROUBLE", board.trouble, alarm=True)] if board.trouble else []


def _limits(board: Board) -> list[Fact]:
    limits = board.limits
    rate = f"{limits.rate_effective:.4g} a second" if limits.rate_effective else "no limit"
    pause = f", all pause for {limits.cooldown_seconds:.1f} s" if limits.cooldown_seconds else ""
    lowered = limits.concurrency_effective < limits.concurrency_configured
    return [
        Fact(
            "limits",
            f"{limits.sandboxes} with a sandbox of {limits.concurrency_effective}"
            + (f" (lowered from {limits.concurrency_configured})" if lowered else "")
            + f"; {limits.waiting} wait for a permit"
            + (f", batches for {limits.batch_places_waiting} places" if limits.batches_waiting else "")
            + f"; creations: {rate}{pause}",
            alarm=bool(pause) or lowered,
        ),
        Fact(
            "429 answers",
            f"{limits.rate_limited} for the rate, {limits.concurrency_limited} for concurrency, of {limits.creations}",
        ),
    ]


def _spending(reading: Status) -> Fact:
    budget, burn = reading.budget, usd(reading.burn_picousd_per_hour)
    text = f"{usd(budget.spent_picousd):.4f} USD, now {burn:.4f} an hour"
    if budget.limit_picousd is None or budget.left_picousd is None:
        return Fact("spent", text)
    left = f"; {usd(budget.left_picousd):.4f} left of {usd(budget.limit_picousd):f}"
    return Fact("spent", text + left, alarm=budget.left_picousd * 5 <= budget.limit_picousd)


def _last(board: Board) -> list[tuple[str, ...]]:
    return [
        (
            show_moment(settled.receipt.finished_at),
            settled.receipt.episode_id,
            settled.receipt.task_id,
            str(settled.receipt.outcome),
            "-" if settled.receipt.reward is None else f"{settled.receipt.reward:.2f}",
            f"{usd(settled.cost_picousd):.6f}",
        )
        for settled in board.last
    ]
