"""`rollout-farm status`: the farm at a glance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from orchestrator.status import Status


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("rollout-farm status", "rollout-farm status --json"))(status)


def status(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show workers, slots, limits, queue, outcomes, who reconciles, and by id what could not be settled yet."""
    import json

    from deploy.commands.resolve import connected_settings
    from deploy.terminal import output
    from orchestrator.farm import open_farm
    from orchestrator.status import read_status

    farm = open_farm(connected_settings())
    reading = read_status(farm.redis, farm.ledger, farm.limiter, farm.presence, farm.queue)
    if as_json:
        typer.echo(json.dumps(reading.as_json()))
    else:
        output().print(_text(reading), markup=False)


def _text(reading: Status) -> str:
    from deploy.moments import show_moment
    from deploy.terminal import safe

    capacity = reading.capacity
    lines = [
        f"workers     {len(reading.workers)} ({capacity.live_slots} live slots)",
        f"capacity    {capacity.free} free; limit {capacity.concurrency_limit}, {capacity.permits} admitted, "
        f"{capacity.reserved} reserved",
        f"queue       {reading.queued_jobs} jobs; {reading.open_episodes} open episodes, "
        f"{reading.running_episodes} running",
        "outcomes    " + (", ".join(f"{name} {count}" for name, count in reading.outcomes.items()) or "none yet"),
    ]
    orphans = f"; orphans deleted so far: {reading.orphans_deleted}" if reading.orphans_deleted else ""
    lines.append(f"reconciler  {reading.leader or 'NONE'}{orphans}")
    lines += [f"worker      {row.worker_id} on {row.host}, pid {row.pid}, {row.state}" for row in reading.workers]
    lines += [
        f"UNRESOLVED  {row.allocation_id}: sandbox {row.sandbox_id or 'not named'}, {row.state}: {row.detail or ''}"
        for row in reading.unresolved
    ]
    lines += [
        f"UNRESOLVED  {item.kind} {item.id}, since {show_moment(item.since)}: {item.reason}"
        for item in reading.not_settled
    ]
    if reading.leader is None:
        lines.append(
            "nobody leads the reconcilers, what killed workers leave stays: start one with rollout-farm orchestrator"
        )
    if not reading.workers:
        lines.append("no worker is alive: start some with rollout-farm worker, or rollout-farm up")
    return "\n".join(safe(line, multiline=False) for line in lines)
