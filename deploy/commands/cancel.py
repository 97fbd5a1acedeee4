"""`rollout-farm cancel`: ending episodes, a group or a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples
from deploy.commands.ids import checked_id

if TYPE_CHECKING:
    from orchestrator.cancellation import Ending


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm cancel --run run-5f0c1a2b3d",
            "rollout-farm cancel --run run-5f0c1a2b3d --group g-17",
            "rollout-farm cancel --episode e-5504544c8dd7488f --no-wait",
        )
    )(cancel)


def cancel(
    *,
    episode: Annotated[list[str] | None, typer.Option(help="This episode; may be given again.")] = None,
    group: Annotated[str | None, typer.Option(help="Every open episode of this group.", callback=checked_id)] = None,
    run: Annotated[str | None, typer.Option(help="Every open episode of this run.", callback=checked_id)] = None,
    wait: Annotated[bool, typer.Option(help="Wait until all have ended and their sandboxes are gone.")] = True,
    wait_seconds: Annotated[float, typer.Option(min=0, max=86_400, help="Wait at most so long.")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """End episodes without a score: queued ones at once, running ones within about a second or after their command.

    Every one gets its receipt, `cancelled` unless it ended otherwise just before, and its sandboxes are confirmed
    absent. Exits 1 when something is still open after the wait. Episodes submitted later are not touched.
    """
    import json

    from deploy.commands.resolve import connected_settings
    from deploy.logs import start_logging
    from deploy.terminal import output
    from orchestrator.cancellation import Cancellation
    from orchestrator.errors import SettingsError
    from orchestrator.farm import open_farm

    if bool(episode) is bool(group or run):
        raise SettingsError("say what to cancel: --episode ID, --group ID, --run ID, or a group of a run")
    settings = connected_settings()
    start_logging(settings)
    cancellation = Cancellation(open_farm(settings))
    named = cancellation.known(episode) if episode else cancellation.open_of(run_id=run, group_id=group)
    cancellation.ask(named)
    ending = cancellation.wait(named, wait_seconds if wait else 0)
    if as_json:
        typer.echo(json.dumps(ending.as_json()))
    else:
        output().print(_text(len(named), ending), markup=False)
    if wait and not ending.complete:
        from deploy.exit_codes import ExitCode

        raise typer.Exit(ExitCode.FAILED)


def _text(asked: int, ending: Ending) -> str:
    from deploy.terminal import safe

    if not asked:
        return "nothing is open: all of it had ended before"
    ended = ", ".join(f"{name} {count}" for name, count in ending.outcomes.items()) or "none yet"
    lines = [f"asked {asked}; ended: {ended}"]
    if ending.open:
        lines.append(f"still open: {len(ending.open)}; they end at their next boundary ({_some(ending.open)})")
    if ending.unsettled:
        lines.append(f"not confirmed absent: {_some(ending.unsettled)}; the orchestrator keeps at it")
    elif not ending.open:
        lines.append("every sandbox of them is confirmed absent")
    return "\n".join(safe(line, multiline=False) for line in lines)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
