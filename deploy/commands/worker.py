"""`rollout-farm worker`: workers on this host; each is a supervisor, its Terminus server and two slots."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.commands.examples import examples


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm worker",
            "REDIS_URL=redis://10.0.0.5:6379/0 E2B_API_KEY=... rollout-farm worker",
            "rollout-farm worker --count 8 --id gpu-host-3",
        )
    )(worker)


def worker(
    worker_id: Annotated[
        str | None, typer.Option("--id", help="Name of this worker, [a-z0-9-]; made from the host's by default.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=256, help="Workers to run; they share most of their memory.")] = 1,
) -> None:
    """Run episodes from the queue, two at a time in each worker, until SIGTERM or Ctrl-C; then drain and leave.

    A second signal closes what still runs instead of finishing it. Where a worker of this --id was there just before,
    this first looks whether that one still lives: for FARM_LEASE_LOST_SECONDS at most (12 s).
    """
    import logging
    import re
    import secrets
    import socket

    from deploy.commands.resolve import connected_settings, is_running, provider_of
    from deploy.logs import start_logging
    from orchestrator.errors import SettingsError
    from orchestrator.farm import open_farm

    settings = connected_settings()
    start_logging(settings)
    host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-")[:24] or "host"
    name = worker_id or f"{host}-{secrets.token_hex(3)}"
    if not re.fullmatch(r"[a-z0-9-]{1,40}", name):
        raise SettingsError(f"--id {name!r}: a worker's id is 1 to 40 of a-z, 0-9 and '-'")

    presence = open_farm(settings).presence
    for row in presence.workers():
        if row.worker_id not in (name, f"{name}-1") or (row.host == socket.gethostname() and not is_running(row.pid)):
            continue
        logging.getLogger(__name__).info("a worker of this id was there just before: looking whether it still lives")
        if presence.beats(row.worker_id, within_seconds=settings.lease_lost_seconds):
            raise SettingsError(
                f"--id {name}: worker {row.worker_id} on {row.host} is alive (pid {row.pid}); "
                "take another id, or end that one first"
            )

    from workers.crew import run_crew

    provider_of(settings)  # imports the SDK before the first fork; makes no request
    run_crew(settings, name, count, lambda: provider_of(settings))
