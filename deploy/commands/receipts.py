"""`rollout-farm receipts`: listing, filtering and exporting what episodes came to."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples
from deploy.commands.ids import checked_id
from orchestrator.vocabulary import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from orchestrator.farm import Farm
    from orchestrator.receipts import ReceiptFilter, Receipts

_TABLE_ROWS = 50
"""A table is for looking at; who wants more says so."""

_MOST_ROWS = 1_000_000_000
"""A larger limit is a slip, and would not fit an index."""


class Format(StrEnum):
    """How receipts are written."""

    TABLE = "table"
    JSONL = "jsonl"
    CSV = "csv"


_SUFFIXES = {".csv": Format.CSV, ".jsonl": Format.JSONL, ".json": Format.JSONL}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm receipts --since 2h",
            "rollout-farm receipts --run run-5f --aborted",
            "rollout-farm receipts --outcome solved --outcome wrong_answer --output receipts.csv",
            "rollout-farm receipts --format jsonl > receipts.jsonl",
            "rollout-farm receipts e-5504544c8dd7488f --transcript",
        )
    )(receipts)


def receipts(
    episode: Annotated[str | None, typer.Argument(help="Show this episode's receipt in full.")] = None,
    *,
    run: Annotated[str | None, typer.Option(help="Only this run's.", callback=checked_id)] = None,
    group: Annotated[str | None, typer.Option(help="Only this group's.", callback=checked_id)] = None,
    task: Annotated[str | None, typer.Option(help="Only this task's.")] = None,
    outcome: Annotated[
        list[Outcome] | None, typer.Option(help="Only with this outcome; may be given again.", show_choices=False)
    ] = None,
    scored: Annotated[bool, typer.Option("--scored", help="Only with a reward.")] = False,
    aborted: Annotated[bool, typer.Option("--aborted", help="Only without a reward.")] = False,
    since: Annotated[
        str | None, typer.Option(help="Only from then on: 90s, 2h, 7d ago, an ISO time (UTC), or unix seconds.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Only up to then; written like --since.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_ROWS, help=f"At most so many; {_TABLE_ROWS} in a table, no limit in an export."),
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="A table by default, or what the name of --output says.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write to this file, in place once it is complete.")
    ] = None,
    transcript: Annotated[
        bool, typer.Option("--transcript", help="With an episode: also what its policy did and saw.")
    ] = False,
) -> None:
    """List receipts, newest first, or show one; export them as JSON lines or CSV.

    Receipts are kept for FARM_RECEIPT_RETENTION_SECONDS, 30 days by default. Needs the farm's Redis and nothing else.
    """
    from deploy.commands.resolve import connected_settings
    from deploy.logs import start_logging
    from deploy.timestamps import parse_span
    from orchestrator.errors import SettingsError
    from orchestrator.farm import open_farm
    from orchestrator.receipts import ReceiptFilter

    if scored and aborted:
        raise typer.BadParameter("either --scored or --aborted: no episode is both")
    chosen = form or (_SUFFIXES.get(output.suffix.lower(), Format.TABLE) if output else Format.TABLE)
    filters = (run, group, task, outcome, scored or None, aborted or None, since, until, limit)
    if episode is not None and any(value is not None for value in filters):
        raise SettingsError("one episode is shown whole: give either an episode or filters")
    if transcript and (episode is None or chosen is Format.CSV):
        raise SettingsError("--transcript goes with one episode, as text or --format jsonl")
    settings = connected_settings()
    start_logging(settings)
    farm = open_farm(settings)
    if episode is not None:
        _write(_one(farm, episode, chosen, transcript=transcript), output)
        return
    begin, end = parse_span(since, until, now=farm.ledger.now())
    outcomes = frozenset(outcome) if outcome else None
    rewarded = scored if scored or aborted else None
    _write(_many(farm, ReceiptFilter(run, group, task, outcomes, rewarded, begin, end), chosen, limit), output)


def _many(farm: Farm, wanted: ReceiptFilter, chosen: Format, limit: int | None) -> Iterator[str]:
    from deploy.receipt_formats import csv_lines, json_lines, table_lines
    from orchestrator.receipts import Receipts

    reader = Receipts(farm.redis, farm.ledger.allocations)
    if wanted.run_id is not None:
        require_run(farm, reader, wanted.run_id)
    if chosen is not Format.TABLE:
        found = reader.select(wanted, limit=limit)
        yield from csv_lines(found) if chosen is Format.CSV else json_lines(found)
        return
    rows = _TABLE_ROWS if limit is None else limit
    for number, line in enumerate(table_lines(reader.select(wanted, limit=rows + 1))):
        if number <= rows:  # number 0 is the heading
            yield line
        elif limit is None:
            yield f"(the newest {rows}; there are more: --limit, or --output receipts.csv for all)"


def _one(farm: Farm, episode_id: str, chosen: Format, *, transcript: bool) -> Iterator[str]:
    import json

    from deploy.receipt_formats import csv_lines, full_lines
    from orchestrator.errors import FarmError
    from orchestrator.transcripts import read_transcript

    settled = farm.ledger.receipt(episode_id)
    if settled is None:
        row = farm.ledger.row(episode_id)
        if row is None:
            raise FarmError(
                f"no episode {episode_id!r}: the farm does not know it, or its receipt has expired; "
                "list them with: rollout-farm receipts"
            )
        raise FarmError(f"{episode_id} has no receipt yet: it is {row.state}")
    entries = read_transcript(farm.redis, episode_id) if transcript else None
    if chosen is Format.CSV:
        yield from csv_lines([settled])
    elif chosen is Format.JSONL:
        body = settled.as_json()
        yield json.dumps(body if entries is None else {**body, "transcript": entries})
    else:
        yield from full_lines(settled, entries)


def require_run(farm: Farm, reader: Receipts, run_id: str) -> None:
    """Raise for a run that the farm does not know; one without a finished episode is known by its open ones."""
    from orchestrator.errors import FarmError
    from orchestrator.runs import count_open

    if not reader.knows_run(run_id) and not count_open(farm.redis, run_id):
        raise FarmError(
            f"no run {run_id!r}: the farm does not know it, or its receipts have expired; "
            "list receipts with: rollout-farm receipts"
        )


def _write(lines: Iterable[str], output: Path | None) -> None:
    """To standard output, or into a file that is there only when it is complete."""
    import sys

    if output is None:
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
        return
    from orchestrator.errors import SettingsError

    whole = output.exists() and not output.is_file()  # /dev/stdout, a named pipe: nothing to put in place
    target = output if whole else output.with_name(f"{output.name}.part")
    try:
        with target.open("w", encoding="utf-8", newline="") as stream:
            for line in lines:
                stream.write(line + "\n")
        if not whole:
            target.replace(output)
    except OSError as error:
        raise SettingsError(f"--output {output}: {error.strerror or error}; name a file that can be written") from error
    finally:
        if not whole:
            target.unlink(missing_ok=True)
