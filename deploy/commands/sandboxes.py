"""`rollout-farm sandboxes`: the local E2B-compatible service by itself, for any program that uses the e2b SDK."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.commands import sandboxes_faults
from deploy.commands.examples import examples


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, help="Run the local E2B-compatible sandbox service, or let it fail.")
    group.command(
        epilog=examples(
            "rollout-farm sandboxes serve",
            "E2B_API_KEY=my-own-key rollout-farm sandboxes serve --port 3000",
        )
    )(serve)
    sandboxes_faults.register(group)
    app.add_typer(group, name="sandboxes", epilog=examples("rollout-farm sandboxes serve --port 3000"))


def serve(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Loopback port; 0 takes a free one.")] = 0,
) -> None:
    """Serve sandboxes on loopback until Ctrl-C. The API key is E2B_API_KEY, or made up and printed once.

    A development backend: each sandbox is a bubblewrap jail on this machine.
    """
    import secrets
    import signal
    import threading

    from deploy.embedded import LocalSandboxes
    from deploy.terminal import output
    from orchestrator.settings import load_settings

    settings = load_settings()
    given = settings.e2b_api_key
    key = given.get_secret_value() if given else f"local-{secrets.token_hex(16)}"
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with LocalSandboxes(settings.state_dir, api_key=key, port=port) as service:
        lines = [
            f"Local sandboxes at {service.url}, until Ctrl-C. To use them with the e2b SDK:",
            f"  export E2B_API_URL={service.url} E2B_SANDBOX_URL={service.url}",
            "  (E2B_API_KEY: the one you set)" if given else f"  export E2B_API_KEY={key}",
            f"With the farm: FARM_E2B_API_URL={service.url} and the same E2B_API_KEY.",
        ]
        output().print("\n".join(lines), markup=False)
        while not stop.wait(1):
            service.check()
