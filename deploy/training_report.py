"""What a training run shows: bars while it goes, a JSON report and a table of signals when it has ended."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.terminal import errors
from orchestrator.records import SettledReceipt
from trainer.signals import advice, told


class TrainingBars:
    """Two bars on standard error, steps and episodes; `trainer.training` calls it a watcher."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=errors(), transient=False)
        self._outcomes: Counter[str] = Counter()

    def __enter__(self) -> TrainingBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, *, step: int, steps: int, episodes: int) -> None:
        """Show both bars."""
        self._steps = self._progress.add_task("steps", total=steps, completed=step)
        self._episodes = self._progress.add_task("episodes", total=episodes)

    def stepped(self, step: int) -> None:
        """Move the first bar."""
        self._progress.update(self._steps, completed=step)

    def ended(self, settled: SettledReceipt) -> None:
        """Move the second bar and say how episodes end."""
        self._outcomes[settled.receipt.outcome] += 1
        counts = ", ".join(f"{outcome} {count}" for outcome, count in self._outcomes.most_common(3))
        self._progress.update(self._episodes, advance=1, description=f"episodes ({counts})")


class NoBars:
    """The watcher of a process that shows nothing."""

    def started(self, *, step: int, steps: int, episodes: int) -> None:
        """Nothing."""

    def stepped(self, step: int) -> None:
        """Nothing."""

    def ended(self, settled: SettledReceipt) -> None:
        """Nothing."""


def report(
    *,
    run_id: str,
    model: str,
    checkpoint: str,
    steps: int,
    metrics: dict[str, float | None],
    receipts: list[SettledReceipt],
) -> dict[str, Any]:
    """The run as JSON: what each episode did, what became of each sandbox, the receipts, the signals."""
    outcomes = dict(Counter(str(settled.receipt.outcome) for settled in receipts))
    return {
        "run_id": run_id,
        "model": model,
        "checkpoint": checkpoint,
        "steps": steps,
        "outcomes": outcomes,
        "metrics": metrics,
        "signals": told(metrics),
        "advice": advice(metrics, outcomes),
        "traces": [
            {
                "episode_id": settled.receipt.episode_id,
                "operations": [operation.model_dump(mode="json") for operation in settled.receipt.operations],
            }
            for settled in receipts
        ],
        "cleanup": [
            {
                "episode_id": row.episode_id,
                "role": row.role,
                "sandbox_id": row.sandbox_id,
                "state": row.state,
                "confirmed_absent": row.absent_at is not None,
                "running_seconds": row.running_seconds,
            }
            for settled in receipts
            for row in settled.allocations
        ],
        "receipts": [settled.as_json() for settled in receipts],
    }


def as_text(found: dict[str, Any]) -> str:
    """The report as it is printed and written."""
    return json.dumps(found, indent=2, allow_nan=False)


def signal_table(metrics: dict[str, float | None]) -> Table:
    """One row a signal."""
    table = Table(title="signals of the last step, counts of the whole run")
    table.add_column("signal", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("tells")
    for row in told(metrics):
        value = row["value"]
        table.add_row(str(row["signal"]), "-" if value is None else f"{value:.4g}", str(row["tells"]))
    return table
