"""`rollout-farm doctor`: does this host have what the settings need?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from deploy.doctor import Finding


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm doctor",
            "REDIS_URL=redis://10.0.0.5:6379/0 E2B_API_KEY=... rollout-farm doctor",
            "rollout-farm doctor --json",
        )
    )(doctor)


def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this host: Python, packages, Redis, provider, key, jails, capacity; say what to mend.

    Exits 1 when something that the settings need is missing.
    """
    import json

    from deploy.commands.resolve import provider_of
    from deploy.doctor import examine, healthy
    from deploy.exit_codes import ExitCode
    from deploy.terminal import output
    from orchestrator.settings import load_settings
    from workers.e2b_local.capability import check_jail

    findings = examine(load_settings(), provider=provider_of, check_jail=check_jail)
    if as_json:
        document = {"healthy": healthy(findings), "findings": [finding.as_json() for finding in findings]}
        typer.echo(json.dumps(document, indent=2))
    else:
        output().print(_table(findings), soft_wrap=False)
    if not healthy(findings):
        raise typer.Exit(ExitCode.FAILED)


def _table(findings: list[Finding]) -> object:
    from rich.table import Table
    from rich.text import Text

    from deploy.doctor import Status
    from deploy.terminal import safe

    styles = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(
            finding.name,
            Text(finding.status, styles[finding.status]),
            Text(safe(finding.detail)),
            Text(safe(finding.mend)),
        )
    return table
