"""`rollout-farm terminus`: a Terminus server alone, for a plain OpenEnv client without the queue."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.commands.examples import examples


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm terminus --port 8010",
            "E2B_API_KEY=... rollout-farm terminus --port 8010",
            "FARM_TERMINUS_TOKEN=... rollout-farm terminus --host 0.0.0.0 --port 8010",
        )
    )(terminus)


def terminus(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8010,
    host: Annotated[str, typer.Option(help="Address; anything but loopback needs FARM_TERMINUS_TOKEN.")] = "127.0.0.1",
) -> None:
    """Serve a two-session Terminus environment over OpenEnv's protocol until Ctrl-C or SIGTERM.

    Sandboxes come from the E2B cloud when E2B_API_KEY is set, else from a local service started for it. This server is
    outside the farm: no queue, no receipts, no farm-wide limits.
    """
    import contextlib
    import secrets
    import signal

    from pydantic import SecretStr

    from deploy.commands.resolve import provider_of, stop_as_ctrl_c_does
    from deploy.embedded import LocalSandboxes
    from deploy.logs import start_logging
    from deploy.terminal import output
    from orchestrator.errors import SettingsError
    from orchestrator.exposure import check_exposure
    from orchestrator.listener import listen
    from orchestrator.settings import load_settings

    stop_as_ctrl_c_does()
    # the server itself ends in order at SIGTERM and SIGINT only
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    settings = load_settings()
    start_logging(settings)

    from workers.terminus.server import serve
    from workers.terminus.session import SessionDefaults

    token = settings.terminus_token.get_secret_value() if settings.terminus_token else None
    check_exposure(host, token, setting="FARM_TERMINUS_TOKEN")  # before anything is started for it
    if settings.e2b_api_key is None and settings.e2b_api_url is not None:
        raise SettingsError("FARM_E2B_API_URL is set and E2B_API_KEY is not; set the key of that service")

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(host, port))  # before sandboxes are started for nothing
        if settings.e2b_api_key is None:
            key = f"local-{secrets.token_hex(16)}"
            url = stack.enter_context(LocalSandboxes(settings.state_dir, api_key=key)).url
            settings = settings.model_copy(update={"e2b_api_key": SecretStr(key), "e2b_api_url": url})
        provider = provider_of(settings)

        def ready(where: str) -> None:
            output().print(f"Terminus at {where}, two sessions, until Ctrl-C.", markup=False)

        defaults = SessionDefaults(template=settings.template)
        serve(provider, settings.budgets, listener=listener, ready=ready, token=token, defaults=defaults)
