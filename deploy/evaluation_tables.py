"""How an evaluation and a comparison are shown: JSON for programs, tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter
from rich.table import Table
from rich.text import Text

from deploy.terminal import safe
from trainer.evaluation.comparison import FEWEST_TASKS, Comparison
from trainer.evaluation.report import Estimate, Report
from trainer.evaluation.statistics import Spread

_ROWS = 40
"""A table shows that many tasks; the JSON has all."""


def as_json(shown: Report | Comparison) -> str:
    """Everything, indented."""
    body: Any = TypeAdapter(type(shown)).dump_python(shown, mode="json")
    if isinstance(shown, Comparison):
        body["decided"] = shown.decided
        body["too_few_tasks"] = shown.too_few_tasks
    return json.dumps(body, indent=2)


def report_table(report: Report) -> Table:
    """One evaluation: the score, then what is no part of it."""
    table = Table("", "value", "95 % interval", title=Text(f"{report.subject.kind} {safe(report.subject.name)}"))
    table.add_row("mean score", *_estimate(report.score))
    for k, estimate in report.pass_at.items():
        table.add_row(f"pass@{k}", *_estimate(estimate))
    table.add_row("tasks x episodes", f"{report.tasks} x {report.episodes_per_task}", "")
    table.add_row("scored episodes", str(report.scored), "", end_section=True)
    for outcome, count in report.outcomes.items():
        table.add_row(outcome, str(count), "")
    failures = ", ".join(f"{name} {count}" for name, count in report.failures.outcomes.items())
    table.add_section()
    table.add_row("infrastructure failures", f"{report.failures.count} ({report.failures.share:.1%})", failures)
    table.add_section()
    table.add_row("", "median", "95 % are below")
    table.add_row("s in the queue", *_spread(report.latency.queue))
    table.add_row("s an episode", *_spread(report.latency.episode))
    table.add_row("s of it generation", *_spread(report.latency.generation), end_section=True)
    table.add_row("sandboxes, USD", f"{report.cost.total_usd:.6f}", f"failures {report.cost.failures_usd:.6f}")
    if report.cost.interrupted_usd:
        table.add_row("", "", f"interrupted {report.cost.interrupted_usd:.6f}")
    return table


def comparison_tables(comparison: Comparison) -> Iterator[Table]:
    """Task by task, then side by side."""
    rows = Table("task", "first", "second", "difference", title="scores")
    for row in comparison.by_task[:_ROWS]:
        rows.add_row(safe(row.task_id), f"{row.first:.3f}", f"{row.second:.3f}", f"{row.difference:+.3f}")
    if len(comparison.by_task) > _ROWS:
        rows.add_row(f"... {len(comparison.by_task) - _ROWS} more in the JSON", "", "", "")
    yield rows
    first, second = comparison.first, comparison.second
    table = Table("", "first", "second", title="second against first")
    table.add_row("policy", Text(safe(first.subject.name)), Text(safe(second.subject.name)))
    table.add_row("mean score", _estimate(first.score)[0], _estimate(second.score)[0])
    table.add_row("difference", "", _difference(comparison.difference))
    if comparison.too_few_tasks:
        table.add_row("", "", f"too few tasks to tell: below {FEWEST_TASKS}")
    table.add_row("better on, worse on", "", f"{comparison.better}, {comparison.worse}", end_section=True)
    table.add_row("infrastructure failures", str(first.failures.count), str(second.failures.count))
    table.add_row("s an episode", _spread(first.latency.episode)[0], _spread(second.latency.episode)[0])
    table.add_row("sandboxes, USD", f"{first.cost.total_usd:.6f}", f"{second.cost.total_usd:.6f}")
    if comparison.left_out:
        table.add_row("no score on one side", "", safe(", ".join(comparison.left_out)))
    for note in comparison.notes:
        table.add_row("note", "", note)
    yield table


def _estimate(estimate: Estimate | None) -> tuple[str, str]:
    if estimate is None:
        return "-", "no scored episode"
    if estimate.interval is None:
        return f"{estimate.value:.3f}", "none: one task"
    return f"{estimate.value:.3f}", f"{estimate.interval.low:.3f} to {estimate.interval.high:.3f}"


def _difference(estimate: Estimate | None) -> str:
    if estimate is None:
        return "no task has a score on both sides"
    if estimate.interval is None:
        return f"{estimate.value:+.3f} (no interval: one task)"
    verdict = "" if estimate.interval.low > 0 or estimate.interval.high < 0 else "; zero is within it"
    return f"{estimate.value:+.3f} ({estimate.interval.low:+.3f} to {estimate.interval.high:+.3f}{verdict})"


def _spread(spread: Spread | None) -> tuple[str, str]:
    return ("-", "-") if spread is None else (f"{spread.median:.2f}", f"{spread.p95:.2f}")
