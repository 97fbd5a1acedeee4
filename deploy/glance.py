"""The farm at a glance, for people: facts as labelled lines, and the same as a board that is drawn again and again.

Pure; a reading in, lines or a renderable out. Whatever a sandbox or another host wrote is shown as text that steers
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.terminal import safe
from deploy.timestamps import show_moment
from orchestrator.cost import usd
from orchestrator.limiter import LimiterReading
from orchestrator.records import SettledReceipt
from orchestrator.status import Status


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
    """What `rollout-farm status` says."""
    capacity = reading.capacity
    orphans = f"; orphans deleted so far: {reading.orphans_deleted}" if reading.orphans_deleted else ""
    reconciler = f"{reading.leader or 'NONE'}, last round {show_moment(reading.reconciled_at)}{orphans}"
    facts = [
        Fact("workers", f"{len(reading.workers)} ({capacity.live_slots} live slots)"),
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
    facts += [Fact("worker", f"{row.worker_id} on {row.host}, pid {row.pid}, {row.state}") for row in reading.workers]
    facts += [
        Fact(
            "UNRESOLVED",
            f"{row.allocation_id}: sandbox {row.sandbox_id or 'not named'}, {row.state}: {row.detail or ''}",
            alarm=True,
        )
        for row in reading.unresolved
    ]
    facts += [
        Fact("UNRESOLVED", f"{item.kind} {item.id}, since {show_moment(item.since)}: {item.reason}", alarm=True)
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


def board_lines(board: Board) -> list[str]:
    """A board as plain text."""
    heading = Fact("at", f"{show_moment(board.at)} UTC")
    return [fact.line() for fact in (heading, *_board_facts(board))] + [
        Fact("ended", "  ".join(cells)).line() for cells in _last(board)
    ]


def draw(board: Board) -> RenderableType:
    """A board for a terminal."""
    grid = Table.grid(padding=(0, 2))
    for fact in _board_facts(board):
        text = safe(fact.text, multiline=False)
        grid.add_row(Text(fact.label, style="bold"), Text(text, style="red" if fact.alarm else ""))
    ended = Table(title="last outcomes", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("finished (UTC)", "episode", "task", "outcome", "reward", "USD"):
        ended.add_column(name, no_wrap=True)
    for cells in _last(board):
        ended.add_row(*(Text(safe(cell, multiline=False)) for cell in cells))
    return Group(Text(f"rollout-farm, {show_moment(board.at)} UTC; Ctrl-C ends this view", style="dim"), grid, ended)


def _board_facts(board: Board) -> list[Fact]:
    limits = board.limits
    rate = f"{limits.rate_effective:.4g} a second" if limits.rate_effective else "no limit"
    pause = f", all pause for {limits.cooldown_seconds:.1f} s" if limits.cooldown_seconds else ""
    lowered = limits.concurrency_effective < limits.concurrency_configured
    facts = [
        Fact(
            "limits",
            f"{limits.sandboxes} with a sandbox of {limits.concurrency_effective}"
            + (f" (lowered from {limits.concurrency_configured})" if lowered else "")
            + f"; {limits.waiting} wait for a permit; creations: {rate}{pause}",
            alarm=bool(pause) or lowered,
        ),
        Fact(
            "429 answers",
            f"{limits.rate_limited} for the rate, {limits.concurrency_limited} for concurrency, of {limits.creations}",
        ),
    ]
    trouble = [Fact("TROUBLE", board.trouble, alarm=True)] if board.trouble else []
    return [*trouble, *facts_of(board.status), *facts]


def _spending(reading: Status) -> Fact:
    budget, burn = reading.budget, usd(reading.burn_picousd_per_hour)
    text = f"{usd(budget.spent_picousd):.4f} USD, now {burn:.4f} an hour"
    if budget.limit_picousd is None or budget.left_picousd is None:
        return Fact("spent", text)
    left = f"; {usd(budget.left_picousd):.4f} left of {usd(budget.limit_picousd):f}"
    return Fact("spent", text + left, alarm=budget.left_picousd * 5 < budget.limit_picousd)


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
