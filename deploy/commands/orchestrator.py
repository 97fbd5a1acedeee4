"""`rollout-farm orchestrator` and `reconcile`: finishing what killed processes left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from redis import Redis
    from starlette.types import ASGIApp

    from orchestrator.dashboard.lookout import Lookout
    from orchestrator.reconciler import Reconciler
    from orchestrator.settings import Settings


_ANSWER_SECONDS = 3.0
"""A Redis that is silent for longer is away: Prometheus gives a scrape ten seconds."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog=examples(
            "rollout-farm orchestrator",
            "rollout-farm orchestrator --metrics-port 9400",
            "FARM_METRICS_TOKEN=... rollout-farm orchestrator --metrics-host 0.0.0.0 --metrics-port 9400",
        )
    )(orchestrator)
    app.command(epilog=examples("rollout-farm reconcile --dry-run", "rollout-farm reconcile"))(reconcile)


def orchestrator(
    *,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Serve the dashboard, /metrics, /healthz and /readyz here; 0 takes a free port. "
            "Default: FARM_METRICS_PORT, or none.",
        ),
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(help="Address; anything but loopback needs FARM_METRICS_TOKEN. Default: FARM_METRICS_HOST."),
    ] = None,
) -> None:
    """Watch over the farm until SIGTERM or Ctrl-C. Run one or more per farm; one of them leads at a time."""
    import contextlib
    import signal
    import threading

    from deploy.commands.resolve import connected_settings, provider_of
    from deploy.logs import start_logging
    from deploy.report_log import ReportLog
    from orchestrator.rounds import run_rounds
    from workers.preflight import require_accepted_key

    settings = connected_settings()
    start_logging(settings)
    port = settings.metrics_port if metrics_port is None else metrics_port
    serving = contextlib.nullcontext() if port is None else _metrics(settings, metrics_host, port)
    require_accepted_key(lambda: provider_of(settings))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    name, redis, reconciler = _reconciler(settings)
    with serving:
        run_rounds(
            redis,
            reconciler,
            name,
            every_seconds=settings.reconcile_seconds,
            stop=stop,
            on_report=ReportLog().add,
        )


def reconcile(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, change nothing.")] = False,
) -> None:
    """Reconcile once and print what was done, or with --dry-run what would be.

    Watches the farm for one lease time first (FARM_LEASE_LOST_SECONDS, 12 s): a worker that is only slow is not lost.
    Where an orchestrator leads already, there is nothing to do by hand, and this says so.
    """
    import json
    from dataclasses import asdict

    from deploy.commands.resolve import connected_settings
    from deploy.logs import start_logging
    from orchestrator.errors import FarmError
    from orchestrator.leadership import Leadership, leader
    from orchestrator.plan import plan

    settings = connected_settings()
    start_logging(settings)
    name, redis, reconciler = _reconciler(settings, only_looks=dry_run)
    reconciler.watch(settings.lease_lost_seconds)
    if dry_run:
        actions = plan(reconciler.look(sweep=True), lease_seconds=settings.lease_lost_seconds)
        typer.echo(json.dumps([{"action": type(action).__name__.lower(), **asdict(action)} for action in actions]))
        return
    leadership = Leadership(redis, name)
    if not leadership.take():
        raise FarmError(
            f"{leader(redis)} leads and reconciles by itself; see what it could not settle: rollout-farm status"
        )
    try:
        report = reconciler.run_once(leading=leadership.take)
    finally:
        leadership.give_back()
    typer.echo(json.dumps(report.as_json()))


@contextmanager
def _metrics(settings: Settings, host: str | None, port: int) -> Iterator[None]:
    """Serve the farm's metrics and dashboard, and say where."""
    from deploy.terminal import output
    from deploy.web_server import serving
    from orchestrator.dashboard.site import add_dashboard
    from orchestrator.exposure import check_exposure
    from orchestrator.farm import open_farm
    from orchestrator.web import create_app

    host = host or settings.metrics_host
    token = settings.metrics_token.get_secret_value() if settings.metrics_token else None
    check_exposure(host, token, setting="FARM_METRICS_TOKEN")
    farm = open_farm(settings, patient=False, answer_seconds=_ANSWER_SECONDS)
    app = create_app(farm, token=token)
    add_dashboard(app, farm, _make_page, token=token)
    with serving(app, host, port) as url:
        output().print(f"Dashboard at {url}/, metrics at {url}/metrics, until Ctrl-C.", markup=False)
        yield


def _make_page(lookout: Lookout, path: str) -> ASGIApp:
    """Import Gradio (seconds, 190 MB) when the first browser comes: nobody else waits for it or pays for it."""
    from orchestrator.dashboard.page import make_page

    return make_page(lookout, path)


def _reconciler(settings: Settings, *, only_looks: bool = False) -> tuple[str, Redis, Reconciler]:
    import secrets

    from deploy.commands.resolve import provider_of
    from orchestrator.farm import open_farm
    from orchestrator.reconciler import Reconciler

    farm = open_farm(settings, patient=False)  # a round that fails is followed by another
    name = f"orchestrator-{secrets.token_hex(4)}"
    return (
        name,
        farm.redis,
        Reconciler(
            name,
            ledger=farm.ledger,
            presence=farm.presence,
            queue=farm.queue,
            limiter=farm.limiter,
            provider=provider_of(settings),
            lease_seconds=settings.lease_lost_seconds,
            create_answer_seconds=2 * settings.budgets.create_request_seconds,
            only_looks=only_looks,
        ),
    )
