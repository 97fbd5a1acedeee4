"""`rollout-farm up`: everything on one machine until Ctrl-C."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.commands.examples import examples


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm up --workers 4",
            "REDIS_URL=redis://127.0.0.1:6379/0 E2B_API_KEY=... rollout-farm up --workers 8",
        )
    )(up)


def up(
    workers: Annotated[int, typer.Option(min=1, max=256, help="Worker processes, two slots each.")] = 2,
) -> None:
    """Run a Redis, a sandbox service, an orchestrator and workers until Ctrl-C or SIGTERM.

    With REDIS_URL set its Redis is used, with E2B_API_KEY set the E2B cloud; only what is missing is started. Other
    commands on this machine (run, status) find this farm by its state directory.
    """
    import signal
    import threading

    from deploy.local_farm import LocalFarm
    from deploy.terminal import output
    from orchestrator.settings import load_settings
    from orchestrator.vocabulary import SLOTS_PER_WORKER

    stop = threading.Event()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signals.append(signal.SIGHUP)

    def on_signal(*_: object) -> None:
        stop.set()
        for number in signals:
            signal.signal(number, signal.default_int_handler)  # a second one closes what still runs

    for number in signals:
        signal.signal(number, on_signal)
    with LocalFarm(load_settings(), workers=workers) as farm:
        where = farm.settings.e2b_api_url or "the E2B cloud"
        slots, port = SLOTS_PER_WORKER * workers, farm.settings.metrics_port
        output().print(
            f"{workers} workers ({slots} slots) are up; sandboxes from {where}; logs in {farm.logs}.\n"
            + (f"Dashboard at http://{farm.settings.metrics_host}:{port}/\n" if port else "")
            + "In another terminal: rollout-farm run weekly-sales --episodes 8, rollout-farm status. Ctrl-C stops.",
            markup=False,
        )
        while not stop.wait(1):
            farm.check()
        output().print("Stopping: running episodes are finished first; Ctrl-C again closes them.", markup=False)
