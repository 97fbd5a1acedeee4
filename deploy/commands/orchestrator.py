"""`rollout-farm orchestrator` and `reconcile`: finishing what killed processes left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from orchestrator.reconciler import Reconciler, Report
    from orchestrator.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog=examples("rollout-farm orchestrator"))(orchestrator)
    app.command(epilog=examples("rollout-farm reconcile --dry-run", "rollout-farm reconcile"))(reconcile)


def orchestrator() -> None:
    """Watch over the farm until SIGTERM or Ctrl-C. Run one or more per farm; one of them leads at a time."""
    import logging
    import signal
    import threading

    from deploy.commands.resolve import connected_settings, provider_of, start_logging
    from orchestrator.farm import open_farm
    from orchestrator.rounds import run_rounds
    from workers.preflight import require_accepted_key

    settings = connected_settings()
    start_logging(settings)
    require_accepted_key(lambda: provider_of(settings))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    name, reconciler = _reconciler(settings)
    logger = logging.getLogger(__name__)

    def log(report: Report) -> None:
        if report.enqueued or report.finished or report.settled:
            logger.warning("enqueued %s, finished %s, settled %s", report.enqueued, report.finished, report.settled)
        for item, reason in report.unresolved.items():
            logger.error("unresolved %s: %s", item, reason)

    run_rounds(
        open_farm(settings, patient=False).redis,
        reconciler,
        name,
        every_seconds=settings.reconcile_seconds,
        stop=stop,
        on_report=log,
    )


def reconcile(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, change nothing.")] = False,
) -> None:
    """Reconcile once and print what was done, or with --dry-run what would be.

    Leases that ran out less than one lease time ago are given that time first.
    """
    import json
    import time
    from dataclasses import asdict

    from deploy.commands.resolve import connected_settings, start_logging
    from orchestrator.reconciler import plan

    settings = connected_settings()
    start_logging(settings)
    _, reconciler = _reconciler(settings)
    time.sleep(settings.lease_lost_seconds)
    if dry_run:
        actions = plan(reconciler.look(), lease_seconds=settings.lease_lost_seconds)
        typer.echo(json.dumps([{"action": type(action).__name__.lower(), **asdict(action)} for action in actions]))
    else:
        typer.echo(json.dumps(asdict(reconciler.run_once())))


def _reconciler(settings: Settings) -> tuple[str, Reconciler]:
    import secrets

    from deploy.commands.resolve import provider_of
    from orchestrator.farm import open_farm
    from orchestrator.reconciler import Reconciler

    farm = open_farm(settings, patient=False)  # a round that fails is followed by another
    name = f"orchestrator-{secrets.token_hex(4)}"
    return name, Reconciler(
        name,
        ledger=farm.ledger,
        queue=farm.queue,
        provider=provider_of(settings),
        lease_seconds=settings.lease_lost_seconds,
        create_answer_seconds=2 * settings.budgets.create_request_seconds,
    )
