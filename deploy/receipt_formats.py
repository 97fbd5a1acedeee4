"""Receipts written out: aligned lines, JSON lines, CSV, and one receipt in full. Pure; a receipt in, text out.

What always holds: money is decimal digits, exactly; no text of a sandbox or task steers a terminal or becomes a
spreadsheet's formula; each format writes a receipt at a time, so none keeps them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deploy.rollouts import json_line
from deploy.terminal import safe
from deploy.timestamps import show_moment
from orchestrator.cost import usd_text
from orchestrator.records import Allocation, SettledReceipt
from orchestrator.vocabulary import Phase, Role

_COLUMNS = "{:<19}  {:<18}  {:<16}  {:<18}  {:>6}  {:>8}  {:>10}  {}"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

FLAT = (
    *("episode_id", "attempt", "run_id", "group_id", "task_id", "task_digest", "template", "drive"),
    *("outcome", "scored", "reward", "detail", "worker_id", "queued_at", "started_at", "finished_at", "total_seconds"),
    *(f"{phase}_seconds" for phase in Phase),
    *("tool_calls", "sandboxes", "sandboxes_absent"),
    *(f"{role}_sandbox_seconds" for role in Role),
    "sandbox_seconds",
    *(f"{role}_cost_usd" for role in Role),
    "cost_usd",
)
"""The CSV's columns; times are unix seconds."""


def table_lines(receipts: Iterable[SettledReceipt]) -> Iterator[str]:
    """A heading and one line a receipt; an aborted one ends with its reason."""
    yield _COLUMNS.format("finished (UTC)", "episode", "task", "outcome", "reward", "s", "USD", "").rstrip()
    for settled in receipts:
        receipt = settled.receipt
        line = _COLUMNS.format(
            show_moment(receipt.finished_at),
            receipt.episode_id,
            receipt.task_id,
            receipt.outcome,
            "-" if receipt.reward is None else f"{receipt.reward:.2f}",
            f"{receipt.finished_at - receipt.queued_at:.2f}",
            f"{float(usd_text(settled.cost_picousd)):.6f}",
            "" if receipt.outcome.scored else receipt.detail or "",
        )
        yield safe(line, multiline=False).rstrip()


def json_lines(receipts: Iterable[SettledReceipt]) -> Iterator[str]:
    """One JSON object a line, as `rollout-farm run` prints them."""
    return (json_line(settled) for settled in receipts)


def csv_lines(receipts: Iterable[SettledReceipt]) -> Iterator[str]:
    """A heading and one record a receipt, without line ends; a record whose text has newlines is still one line."""
    yield record(FLAT)
    for settled in receipts:
        flat = flatten(settled)
        yield record([flat[name] for name in FLAT])


def flatten(settled: SettledReceipt) -> dict[str, Any]:
    """A receipt as one value for each column of FLAT."""
    receipt = settled.receipt
    flat = {name: value for name, value in receipt.model_dump(mode="json").items() if name in FLAT}
    flat["scored"] = "true" if receipt.outcome.scored else "false"
    flat["total_seconds"] = _seconds(receipt.finished_at - receipt.queued_at)
    flat |= {f"{phase}_seconds": receipt.phases.get(phase) for phase in Phase}
    flat["tool_calls"] = sum(1 for step in receipt.operations if step.name == "terminal")
    flat["sandboxes"] = sum(1 for row in settled.allocations if row.sandbox_id is not None)
    flat["sandboxes_absent"] = sum(1 for row in settled.allocations if row.absent_at is not None)
    for role in Role:
        rows = [row for row in settled.allocations if row.role is role]
        flat[f"{role}_sandbox_seconds"] = _running(rows)
        flat[f"{role}_cost_usd"] = usd_text(sum(row.cost_picousd or 0 for row in rows))
    flat["sandbox_seconds"] = _running(settled.allocations)
    flat["cost_usd"] = usd_text(settled.cost_picousd)
    return flat


def full_lines(settled: SettledReceipt, transcript: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    """One receipt for people: what it says, its sandboxes, and what the policy did and saw when that is given."""
    receipt = settled.receipt
    facts = {
        "episode": f"{receipt.episode_id}, attempt {receipt.attempt}, {receipt.drive}",
        "run": f"{receipt.run_id}, group {receipt.group_id or '-'}",
        "task": f"{receipt.task_id} ({receipt.task_digest[:12]}), template {receipt.template}",
        "outcome": f"{receipt.outcome}, reward {'none' if receipt.reward is None else receipt.reward}",
        "detail": receipt.detail or "-",
        "worker": receipt.worker_id or "-",
        "queued": show_moment(receipt.queued_at),
        "started": show_moment(receipt.started_at),
        "finished": show_moment(receipt.finished_at),
        "seconds": ", ".join(f"{phase} {seconds:g}" for phase, seconds in receipt.phases.items()) or "-",
        "bytes": ", ".join(f"{name} {size}" for name, size in receipt.sizes.items()) or "-",
        "cost": f"{usd_text(settled.cost_picousd)} USD",
    }
    yield from (safe(f"{name:<9} {value}", multiline=False) for name, value in facts.items())
    for row in settled.allocations:
        ran = "-" if row.running_seconds is None else f"{row.running_seconds:g} s"
        cost = "-" if row.cost_picousd is None else f"{usd_text(row.cost_picousd)} USD"
        name = row.sandbox_id or "never named"
        line = f"sandbox   {row.role}: {name}, {row.state}, ran {ran}, {cost} {row.detail or ''}"
        yield safe(line, multiline=False).rstrip()
    for step in receipt.operations:
        how = "ok" if step.ok else "failed"
        code = "" if step.exit_code is None else f", exit {step.exit_code}"
        yield safe(f"step      {step.name} {how}, {step.seconds:g} s{code}{', timed out' * step.timed_out}")
    for entry in transcript or ():
        yield f"--- {safe(str(entry['role']), multiline=False)}"
        yield safe(str(entry["text"])).rstrip("\n")
    if transcript is not None and not transcript:
        yield "(no transcript: none was kept, or it has expired)"


def _running(rows: Iterable[Allocation]) -> float:
    return _seconds(sum(row.running_seconds or 0.0 for row in rows))


def _seconds(value: float) -> float:
    return round(value, 6)


def record(values: Iterable[object]) -> str:
    """One CSV record, without its line end; see `_cell`."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow([_cell(value) for value in values])
    return text.getvalue()


def _cell(value: object) -> object:
    """Text that a spreadsheet would calculate gets a quote in front; numbers stay numbers."""
    if not isinstance(value, str):
        return value
    shown = safe(value, multiline=False)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown
