"""A bill written out: a table, JSON, CSV. Pure; money is decimal digits, exactly, but for the table's six places."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.receipt_formats import record
from deploy.terminal import safe
from orchestrator.cost import By, usd, usd_text
from orchestrator.spending import NO_GROUP, Bill

_COLUMNS = "{:<34}  {:>8}  {:>9}  {:>5}  {:>12}  {:>12}  {:>12}  {:>12}"


def fields(bill: Bill) -> dict[str, Any]:
    """A bill as plain values."""
    return {
        "episodes": bill.episodes,
        "sandboxes": bill.sandboxes,
        "open_sandboxes": bill.open_sandboxes,
        "sandbox_seconds": bill.running_ms / 1000,
        "waiting_seconds": bill.waiting_ms / 1000,
        "cost_usd": usd_text(bill.cost_picousd),
        "waiting_usd": usd_text(bill.waiting_picousd),
    }


def table(by: By, sums: Mapping[str, Bill], total: Bill) -> Iterator[str]:
    """A heading, a line for each key, a total."""
    heading = (by, "episodes", "sandboxes", "open", "sandbox s", "waiting s", "USD", "waiting USD")
    yield _COLUMNS.format(*heading)
    for key, bill in (*sums.items(), ("total", total)):
        values = (
            *(bill.episodes, bill.sandboxes, bill.open_sandboxes),
            *(f"{bill.running_ms / 1000:.1f}", f"{bill.waiting_ms / 1000:.1f}"),
            *(f"{usd(bill.cost_picousd):.6f}", f"{usd(bill.waiting_picousd):.6f}"),
        )
        yield safe(_COLUMNS.format(key, *values), multiline=False)


def json_text(by: By, sums: Mapping[str, Bill], total: Bill, burn_picousd_per_hour: int) -> str:
    """One JSON object."""
    rows = [{str(by): key, **fields(bill)} for key, bill in sums.items()]
    burn = usd_text(burn_picousd_per_hour)
    return json.dumps({"by": str(by), "rows": rows, "total": fields(total), "burn_usd_per_hour": burn})


def csv_lines(by: By, sums: Mapping[str, Bill]) -> Iterator[str]:
    """A heading and a record for each key, without a total: a spreadsheet makes its own. No group is an empty cell."""
    yield record([by, *fields(Bill())])
    for key, bill in sums.items():
        yield record(["" if key == NO_GROUP else key, *fields(bill).values()])
