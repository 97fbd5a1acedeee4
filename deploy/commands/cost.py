"""`rollout-farm cost`: what sandboxes cost, by whatever one asks for."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from deploy.commands.examples import examples
from deploy.commands.ids import checked_id
from orchestrator.cost import By


class Format(StrEnum):
    """How a bill is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm cost",
            "rollout-farm cost --run run-5f0c1a2b3d --by task",
            "rollout-farm cost --by day --since 30d --format csv > days.csv",
            "rollout-farm cost --by outcome --json",
        )
    )(cost)


def cost(
    *,
    by: Annotated[By, typer.Option(help="What to split by.")] = By.ROLE,
    run: Annotated[str | None, typer.Option(help="Only this run's.", callback=checked_id)] = None,
    group: Annotated[str | None, typer.Option(help="Only this group's.", callback=checked_id)] = None,
    task: Annotated[str | None, typer.Option(help="Only this task's.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only episodes that ended since: 90s, 2h, 7d ago, an ISO time, or unix seconds.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Only those that ended up to then; open ones do not count then.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How to write it.")] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Sum up what sandboxes cost: running time times real size, at the rates of FARM_VCPU_USD_PER_SECOND and
    FARM_GIB_USD_PER_SECOND; those that run now count up to now.

    Waiting is the part of the policy sandboxes' time in which no command ran: the model was thinking. Receipts are kept
    for FARM_RECEIPT_RETENTION_SECONDS; what is older is not counted. Local sandboxes are priced like E2B's.
    """
    import sys

    from deploy.bill_formats import csv_lines, json_text, table
    from deploy.commands.receipts import require_run
    from deploy.commands.resolve import connected_settings
    from deploy.logs import start_logging
    from deploy.timestamps import parse_span
    from orchestrator.cost import usd
    from orchestrator.farm import open_farm
    from orchestrator.receipts import ReceiptFilter, Receipts
    from orchestrator.spending import Spending, burn_picousd_per_hour

    settings = connected_settings()
    start_logging(settings)
    farm = open_farm(settings)
    receipts = Receipts(farm.redis, farm.ledger.allocations)
    now = farm.ledger.now()
    begin, end = parse_span(since, until, now=now)
    if run is not None:
        require_run(farm, receipts, run)
    wanted = ReceiptFilter(run_id=run, group_id=group, task_id=task, since=begin, until=end)
    sums, total = Spending(farm.ledger, receipts).bills(by, wanted)
    burn = burn_picousd_per_hour(farm.ledger.allocations.running())
    if as_json or form is Format.JSON:
        lines = [json_text(by, sums, total, burn)]
    elif form is Format.CSV:
        lines = list(csv_lines(by, sums))
    else:
        lines = [*table(by, sums, total)]
        if burn:
            lines.append(f"what runs now, in all runs, costs {usd(burn):.4f} USD an hour")
    sys.stdout.write("\n".join(lines) + "\n")
