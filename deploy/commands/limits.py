"""`rollout-farm limits`: both limits of the whole farm, read and changed while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from orchestrator.limiter import LimiterReading
    from orchestrator.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm limits",
            "rollout-farm limits --json",
            "rollout-farm limits --concurrency 100 --rate 5",
            "rollout-farm limits --plan pro",
            "rollout-farm limits --reset",
        )
    )(limits)


def limits(
    *,
    concurrency: Annotated[
        int | None, typer.Option(help="Set how many sandboxes may run at once, for every process, from now on.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Set how many sandboxes may be created a second; 0 for no limit of ours.")
    ] = None,
    plan: Annotated[str | None, typer.Option(help="Set both to a plan's of the E2B cloud: hobby or pro.")] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="First forget what was set here and what 429 answers taught.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the farm's limits, what is in force and who waits; change them while it runs.

    What is set here wins over FARM_CONCURRENCY_LIMIT, FARM_CREATION_RATE and FARM_PLAN of every process until --reset.
    A lowered limit lets running episodes finish; a raised one wakes those who wait. Setting a limit forgets what 429
    answers taught about it.
    """
    import json
    from dataclasses import asdict

    from deploy.commands.resolve import connected_settings
    from deploy.terminal import output
    from orchestrator.farm import open_farm
    from orchestrator.settings import PLANS

    settings = connected_settings()
    limiter = open_farm(settings).limiter
    if plan is not None:
        if plan not in PLANS:
            raise typer.BadParameter(f"there is no plan {plan!r}; there are {', '.join(PLANS)}", param_hint="--plan")
        of_plan = PLANS[plan]
        concurrency = of_plan[0] if concurrency is None else concurrency
        rate = of_plan[1] if rate is None else rate
    if reset or concurrency is not None or rate is not None:
        limiter.change(concurrency=concurrency, rate=rate, reset=reset)
    reading = limiter.read()
    if as_json:
        typer.echo(json.dumps({**asdict(reading), "plan": settings.plan, "plans": PLANS}))
    else:
        output().print(_text(reading, settings), markup=False)


def _text(reading: LimiterReading, settings: Settings) -> str:
    from orchestrator.settings import PLANS

    def origin(live: bool) -> str:  # noqa: FBT001
        return "set here" if live else f"plan {settings.plan}" if settings.plan else "settings"

    lowered = reading.concurrency_effective < reading.concurrency_configured
    slowed = reading.rate_effective != reading.rate_configured
    attempts = max(1, reading.creations)
    refused = reading.rate_limited + reading.concurrency_limited
    lines = [
        f"concurrency  {reading.concurrency_configured} ({origin(reading.concurrency_set_live)})"
        + (f", {reading.concurrency_effective} in force since the provider refused more" if lowered else ""),
        f"permits      {reading.held} held, {reading.waiting} waiting, {reading.reserved} reserved; "
        f"{reading.sandboxes} with a sandbox"
        + (
            f"; batches in line: {reading.batches_waiting}, for {reading.batch_places_waiting} places"
            if reading.batches_waiting
            else ""
        ),
        f"creations    {_rate(reading.rate_configured)} ({origin(reading.rate_set_live)})"
        + (
            f", {_rate(reading.rate_effective)} in force since {_rate(reading.refused_rate)} was refused"
            if slowed
            else ""
        ),
        f"waiting      {reading.verifiers_waiting_to_create} verifiers, {reading.policies_waiting_to_create} policies"
        + (f"; all pause for {reading.cooldown_seconds:.1f} s" if reading.cooldown_seconds else ""),
        f"429 answers  {reading.rate_limited} for the rate, {reading.concurrency_limited} for concurrency; "
        f"{reading.creations} creations sent, {100 * refused / attempts:.1f} % refused",
        "plans        "
        + "; ".join(f"{name}: {limit} sandboxes, {_rate(each)}" for name, (limit, each) in PLANS.items()),
    ]
    return "\n".join(lines)


def _rate(each: float) -> str:
    return f"{each:.4g} a second" if each else "no limit"
