"""Running scripted episodes and showing them: submission, progress, receipts as JSON lines, a summary table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.terminal import errors, safe
from orchestrator.cost import usd
from orchestrator.pool import Pool
from orchestrator.records import Script, SettledReceipt
from orchestrator.tasks import Task, TaskError


def scripts_of(task: Task, name: str | None) -> list[Script]:
    """The task's scripted policies, or the one named; raises TaskError when it has none."""
    known = [Script(name=label, commands=commands) for label, commands in task.scripts.items()]
    chosen = [script for script in known if name in (None, script.name)]
    if not chosen:
        has = ", ".join(script.name for script in known) or "none"
        what = f"no script {name!r}; it has: {has}" if name is not None else "it has no script to run"
        raise TaskError(
            [f'{task.id}: {what}. Add one under "scripts", or let a model act: rollout-farm evaluate --model']
        )
    return chosen


def run_scripted(
    pool: Pool, tasks: Sequence[Task], *, episodes: int, script: str | None, check: Callable[[], None]
) -> Iterator[SettledReceipt]:
    """Run `episodes` of each task, its scripts in turn, under a progress bar; receipts as they come."""
    plans = [
        (task, policy)
        for task in tasks
        for policy in itertools.islice(itertools.cycle(scripts_of(task, script)), episodes)
    ]
    submitted = [pool.submit(task, policy=policy, group_id=f"{pool.run_id}-{task.id}"[:64]) for task, policy in plans]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors(), transient=False) as bar:
        row = bar.add_task("episodes", total=len(submitted))
        for settled in pool.as_completed(submitted, check=check):
            bar.advance(row)
            yield settled


def json_line(settled: SettledReceipt) -> str:
    """One receipt as one line."""
    return json.dumps(settled.as_json())


def summary(receipts: Sequence[SettledReceipt]) -> Table:
    """One row a receipt."""
    table = Table(title="receipts", box=None, padding=(0, 1))  # as wide as 80 columns allow
    table.add_column("episode", no_wrap=True)
    table.add_column("task", max_width=12)
    table.add_column("outcome", min_width=12)
    for heading in ("reward", "s", "absent", "USD"):
        table.add_column(heading, justify="right", no_wrap=True)
    for settled in receipts:
        receipt = settled.receipt
        absent = sum(1 for row in settled.allocations if row.absent_at is not None)
        table.add_row(
            safe(receipt.episode_id),
            safe(receipt.task_id),
            receipt.outcome if receipt.outcome.scored else f"{receipt.outcome}: {safe(receipt.detail or '')}",
            "-" if receipt.reward is None else f"{receipt.reward:.1f}",
            f"{receipt.finished_at - receipt.queued_at:.2f}",
            f"{absent} of {len(settled.allocations)}",
            f"{usd(settled.cost_picousd):.6f}",
        )
    return table
