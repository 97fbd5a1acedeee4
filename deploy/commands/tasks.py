"""`rollout-farm tasks`: looking at task files before anything runs them."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.commands.examples import examples


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, help="Check task files.")
    group.command(
        epilog=examples(
            "rollout-farm tasks check weekly-sales",
            "rollout-farm tasks check task.json more-tasks.jsonl",
        )
    )(check)
    app.add_typer(group, name="tasks", epilog=examples("rollout-farm tasks check task.json"))


def check(
    file: Annotated[list[str], typer.Argument(help="Task files (.json, .jsonl) or built-in names.")],
) -> None:
    """Validate task files; each problem is one line that names file, line and field."""
    from deploy.exit_codes import ExitCode
    from deploy.terminal import errors, output, safe
    from orchestrator.tasks import TaskError, load_tasks

    broken = False
    for name in file:
        try:
            found = load_tasks(name)
        except TaskError as error:
            broken = True
            for problem in error.problems:
                errors().print(safe(problem, multiline=False), style="red", markup=False)
            continue
        ids = ", ".join(task.id for task in found)
        output().print(safe(f"{name}: {len(found)} task{'' if len(found) == 1 else 's'} ok: {ids}"), markup=False)
    if broken:
        raise typer.Exit(ExitCode.TASK)
