"""`rollout-farm sandboxes faults`: make a running local sandbox service fail, and stop it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from workers.e2b_local.faults import Faults

_SECONDS = 10.0

Url = Annotated[
    str | None,
    typer.Option(help="Of the service. Default: FARM_E2B_API_URL, or the stack that runs in FARM_STATE_DIR."),
]


def register(group: typer.Typer) -> None:
    """Add the group."""
    faults = typer.Typer(no_args_is_help=True, help="Let a running local service fail on purpose.")
    faults.command("show", epilog=examples("rollout-farm sandboxes faults show"))(show)
    faults.command(
        "set",
        epilog=examples(
            "rollout-farm sandboxes faults set create_rate=5",
            "rollout-farm sandboxes faults set lost.create=2 latency.create=lognormal:0.2:0.6 only.role=verifier",
            """rollout-farm sandboxes faults set '{"unavailable": {"delete": "25%"}, "seed": 7}'""",
        ),
    )(set_faults)
    faults.command("clear", epilog=examples("rollout-farm sandboxes faults clear"))(clear)
    group.add_typer(faults, name="faults", epilog=examples("rollout-farm sandboxes faults set create_rate=5"))


def show(*, url: Url = None) -> None:
    """Print the faults that are set and how often each has struck since, as JSON."""
    _print(_ask("GET", url))


def set_faults(
    fault: Annotated[list[str], typer.Argument(metavar="NAME=VALUE... | JSON", help="Faults, or one JSON object.")],
    *,
    url: Url = None,
) -> None:
    """Inject these faults from now on, and no others; they last until they are cleared or the service ends.

    A value says how often: 3 (the next three), 25%, always. Latencies are constant:SECONDS, uniform:FROM:TO,
    exponential:MEAN or lognormal:MEDIAN:SIGMA.
    """
    _print(_ask("PUT", url, _read(fault)))


def clear(*, url: Url = None) -> None:
    """Inject nothing any more; a deletion that was answered too early still comes."""
    _print(_ask("DELETE", url))


def _print(answer: Any) -> None:
    import json

    typer.echo(json.dumps(answer, indent=2))


def _read(words: list[str]) -> Faults:
    """Faults from NAME=VALUE words or from one JSON object; raises typer's usage error."""
    import json

    from pydantic import ValidationError

    from workers.e2b_local.faults import Faults, explain

    if words[0].lstrip().startswith("{"):
        try:
            (text,) = words
            given: Any = json.loads(text)
        except ValueError as error:
            raise typer.BadParameter(f"not one JSON object: {error}") from None
    else:
        given = nested(words)
    try:
        return Faults.model_validate(given)
    except ValidationError as error:
        raise typer.BadParameter("; ".join(explain(problem) for problem in error.errors())) from None


def nested(words: list[str]) -> dict[str, Any]:
    """What NAME=VALUE words say, a dot in a name leading into a group; raises typer's usage error."""
    given: dict[str, Any] = {}
    for word in words:
        name, is_one, value = word.partition("=")
        if not is_one:
            raise typer.BadParameter(f"{word!r}: say NAME=VALUE, such as create_rate=5, or give one JSON object")
        group, dotted, member = name.partition(".")
        if not dotted:
            given[group] = value
        elif isinstance(given.setdefault(group, {}), dict):
            given[group][member] = value
    return given


def _ask(method: str, url: str | None, faults: Faults | None = None) -> Any:
    """One request to the admin route; raises SettingsError or ProviderError that says what to do."""
    import httpx

    from deploy.embedded import running_stack
    from orchestrator.errors import AuthenticationFailed, ProviderError, SettingsError
    from orchestrator.settings import load_settings

    settings = load_settings()
    settings = running_stack(settings) or settings
    base, key = (url or settings.e2b_api_url or "").rstrip("/"), settings.e2b_api_key
    if not base:
        raise SettingsError(
            f"no local sandbox service is known: none runs in {settings.state_dir}; "
            "say --url http://127.0.0.1:PORT, or set FARM_E2B_API_URL"
        )
    if key is None:
        raise SettingsError("E2B_API_KEY is not set; set it to the key that the service printed when it started")
    try:
        answer = httpx.request(
            method,
            f"{base}/admin/faults",
            headers={"X-API-KEY": key.get_secret_value()},
            json=faults.shown() if faults else None,
            timeout=_SECONDS,
            trust_env=False,
        )
        said = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ProviderError(
            f"nothing answers at {base} ({error}); is `rollout-farm sandboxes serve` running?"
        ) from None
    except ValueError:
        raise ProviderError(f"{base} is not the local sandbox service: only that injects faults") from None
    if answer.status_code in (401, 403):
        raise AuthenticationFailed(f"{base} refuses the key; set E2B_API_KEY to the one it printed when it started")
    if answer.status_code == 404:
        raise ProviderError(f"{base} has no faults: only the local sandbox service of this version injects them")
    if not answer.is_success:
        raise ProviderError(f"{base}: {said.get('message', answer.status_code)}")
    return said
