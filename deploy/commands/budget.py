"""`rollout-farm budget`: the hard cap on what the farm, or one run, may spend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples
from deploy.commands.ids import checked_id

if TYPE_CHECKING:
    from orchestrator.budget import Balance


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm budget",
            "rollout-farm budget --set 50",
            "rollout-farm budget --run run-5f0c1a2b3d --set 2.50",
            "rollout-farm budget --run run-5f0c1a2b3d --clear",
            "rollout-farm budget --json",
        )
    )(budget)


def budget(
    *,
    run: Annotated[
        str | None, typer.Option(help="The budget of this run; without it, the farm's.", callback=checked_id)
    ] = None,
    farm: Annotated[bool, typer.Option("--farm", help="The farm's budget, as without --run.")] = False,
    amount: Annotated[
        str | None, typer.Option("--set", metavar="USD", help="Spend no more than this in all, from the beginning.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take the limit away.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show, set or clear what may be spent. The cap is hard: it holds for every process, at once.

    Before an episode gets a sandbox, the most that it can cost (both sandboxes, for as long as they can live) is
    reserved; what it did cost takes its place afterwards. An episode that does not fit any more ends as
    budget_exhausted; running ones finish. What counts is all that was ever spent, so a larger --set lets the same run
    go on.
    """
    import json

    from deploy.commands.resolve import connected_settings
    from deploy.terminal import errors, output, safe
    from orchestrator.errors import FarmError, SettingsError
    from orchestrator.farm import open_farm
    from orchestrator.runs import count_open

    if farm and run is not None:
        raise SettingsError("give --run for a run's budget or --farm for the farm's, not both")
    if clear and amount is not None:
        raise SettingsError("give --set or --clear, not both")
    opened = open_farm(connected_settings())
    purse = opened.budget
    fresh = run is not None and not purse.known(run) and not count_open(opened.redis, run)
    if clear or amount is not None:
        balance = purse.set(amount, run_id=run)
    elif fresh:
        raise FarmError(f"no run {run!r}: the farm does not know it; see what there is: rollout-farm cost --by run")
    else:
        balance = purse.read(run)
    if as_json:
        typer.echo(json.dumps({"run_id": run, **balance.as_json()}))
    else:
        whose = "the farm" if run is None else safe(f"run {run}", multiline=False)
        output().print(f"{whose}: {balance_text(balance)}", markup=False)
    if fresh:
        errors().print(
            f"no such run yet: {run} has this limit once it begins" if amount else "no such run yet", markup=False
        )


def balance_text(balance: Balance) -> str:
    """A balance in one line."""
    from orchestrator.cost import usd

    spent = f"{usd(balance.spent_picousd):.6f} USD spent, {usd(balance.reserved_picousd):.6f} reserved"
    if balance.limit_picousd is None or balance.left_picousd is None:
        return f"{spent}; no limit"
    return f"{spent}, {usd(balance.left_picousd):.6f} left of {usd(balance.limit_picousd):f}"
