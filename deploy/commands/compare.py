"""`rollout-farm compare`: two evaluations of the same tasks, the second against the first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.commands.examples import examples


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples("rollout-farm compare base trained", "rollout-farm compare base trained > comparison.json")
    )(compare)


def compare(
    first: Annotated[Path, typer.Argument(help="The --output of an evaluation: what the second is measured by.")],
    second: Annotated[Path, typer.Argument(help="The --output of the other.")],
) -> None:
    """Compare two evaluations: the difference per task, second minus first, with a bootstrap interval over tasks.

    Refuses, and says what differs, unless tasks, held-out data, prompts, seeds, sampling, budgets and sandboxes were
    the same. Failures, latency and cost stand side by side and are no part of the difference. JSON goes to standard
    output, a table to standard error.
    """
    from deploy.evaluation_tables import as_json, comparison_tables
    from deploy.terminal import errors
    from trainer.evaluation.comparison import compare as compare_evaluations
    from trainer.evaluation.results import read_evaluation

    comparison = compare_evaluations(read_evaluation(first), read_evaluation(second))
    for table in comparison_tables(comparison):
        errors().print(table, soft_wrap=False)
    typer.echo(as_json(comparison))
