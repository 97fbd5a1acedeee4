"""`rollout-farm run`: episodes of tasks with scripted policies, receipts as JSON lines."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.commands.examples import examples

_STILL_OPEN = "{count} episodes have no receipt yet: rollout-farm status; to end them: rollout-farm cancel --run {run}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm run weekly-sales --episodes 8",
            "rollout-farm run task.json --policy scripted --script repair --episodes 100 > receipts.jsonl",
            "rollout-farm run weekly-sales --episodes 1000 --budget 0.50",
            "rollout-farm run weekly-sales --workers 4   # a farm of its own, when none is running",
        )
    )(run)


def run(
    task: Annotated[list[str], typer.Argument(help="Task files (.json, .jsonl) or built-in names.")],
    policy: Annotated[
        str, typer.Option(help="Who acts: 'scripted' runs the scripts that the tasks carry.")
    ] = "scripted",
    script: Annotated[str | None, typer.Option(help="Only the script of this name; all in turn by default.")] = None,
    episodes: Annotated[int, typer.Option(min=1, max=1_000_000, help="Episodes of each task.")] = 1,
    budget: Annotated[str | None, typer.Option(metavar="USD", help="Spend no more than this in all.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Workers to start when no farm is running.")] = 2,
) -> None:
    """Run episodes through the queue: progress and a summary on standard error, receipts on standard output.

    Uses the farm that REDIS_URL or a running `rollout-farm up` names; else starts one for this run. Exits 8 when an
    episode ended without a score, such as budget_exhausted.
    """
    import contextlib
    import sys

    from deploy.commands.resolve import stop_as_ctrl_c_does
    from deploy.embedded import running_stack
    from deploy.exit_codes import ExitCode
    from deploy.local_farm import LocalFarm
    from deploy.rollouts import json_line, run_scripted, scripts_of, summary
    from deploy.terminal import errors
    from orchestrator.cost import parse_usd
    from orchestrator.errors import SettingsError
    from orchestrator.pool import Pool
    from orchestrator.settings import load_settings
    from orchestrator.tasks import load_tasks

    stop_as_ctrl_c_does()
    if policy != "scripted":
        raise SettingsError(f"--policy {policy!r}: only 'scripted' is built in; drive models through orchestrator.Pool")
    tasks = [found for name in task for found in load_tasks(name)]
    for found in tasks:
        scripts_of(found, script)  # a name that is wrong is said before anything is started
    parse_usd(budget or 0, name="--budget")
    settings = load_settings()
    with contextlib.ExitStack() as stack:
        resolved = running_stack(settings) or settings
        check = _nothing
        if resolved.redis_url is None:
            farm = stack.enter_context(LocalFarm(settings, workers=workers, temporary=True))
            resolved, check = farm.settings, farm.check
        pool = stack.enter_context(Pool(resolved, budget_usd=budget))
        errors().print(f"run {pool.run_id}", markup=False)
        if not pool.capacity().live_slots:
            errors().print("no worker is alive yet; waiting for one (rollout-farm worker starts one)", markup=False)
        receipts = []
        try:
            for settled in run_scripted(pool, tasks, episodes=episodes, script=script, check=check):
                receipts.append(settled)
                sys.stdout.write(json_line(settled) + "\n")
                sys.stdout.flush()
        finally:
            errors().print(summary(receipts), soft_wrap=False)
            if still_open := len(pool.submitted) - len(receipts):
                errors().print(_STILL_OPEN.format(count=still_open, run=pool.run_id), markup=False)
    if any(settled.receipt.reward is None for settled in receipts):
        raise typer.Exit(ExitCode.ABORTED)


def _nothing() -> None:
    return None
