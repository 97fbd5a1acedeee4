"""`rollout-farm evaluate`: a model, a checkpoint or a script over a task set, several episodes a task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from deploy.evaluations import Options


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm evaluate tasks.jsonl --model training-output/checkpoint --episodes 8 --output trained",
            "rollout-farm evaluate tasks.jsonl --model Qwen/Qwen3-0.6B --episodes 8 --output base",
            "rollout-farm compare base trained",
            "rollout-farm evaluate weekly-sales --script repair --episodes 4 --output scripted",
        )
    )(evaluate)


_Tokens = Annotated[int, typer.Option(min=1, help="Of an episode, observations included, as in training.")]
_Live = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="Episodes live at once; by default all slots, at most --batch. More than --batch wait for the model, in "
        "their own time; more than slots wait for their turn.",
    ),
]
_Retry = Annotated[bool, typer.Option("--retry-failed", help="Run episodes again that ended without a score.")]
_Patience = Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds to wait while no worker is alive.")]
_Output = Annotated[Path, typer.Option(help="Directory for results.jsonl and report.json; named again, it goes on.")]


def evaluate(
    *,
    task: Annotated[list[str], typer.Argument(help="Task files (.json, .jsonl) or built-in names.")],
    output: _Output,
    model: Annotated[str | None, typer.Option(help="A checkpoint's directory or a model id.")] = None,
    script: Annotated[
        str | None, typer.Option(help="Instead of a model: the script of this name in each task.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, max=100_000, help="Episodes of each task.")] = 4,
    seed: Annotated[int, typer.Option(help="Each episode's own seed is derived from it.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, max=100, help="0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0001, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    max_completion_tokens: _Tokens = 512,
    max_turns: Annotated[int, typer.Option(min=1, help="Answers of the model in an episode.")] = 16,
    system_prompt: Annotated[str | None, typer.Option(help="Put before each task's prompt.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; a GPU where there is one.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Episodes that the model answers at once.")] = 16,
    parallel: _Live = None,
    retry_failed: _Retry = False,
    label: Annotated[str, typer.Option(help="Another label makes the same evaluation run anew.")] = "",
    workers: Annotated[int, typer.Option(min=1, max=256, help="Workers to start when no farm is running.")] = 2,
    worker_patience: _Patience = 60.0,
) -> None:
    """Evaluate a policy: mean score and pass@k with intervals; infrastructure failures, latency and cost on their own.

    The report goes to standard output as JSON, a table to standard error. Interrupted, it goes on where it was when it
    is started again with the same --output. Uses the farm that REDIS_URL or a running `rollout-farm up` names; else
    starts one. Exits 8 when an episode has no score, 6 when no worker was alive for --worker-patience.
    """
    from deploy.evaluations import Options
    from orchestrator.errors import SettingsError
    from trainer.evaluation.identity import Sampling

    if (model is None) == (script is None):
        raise SettingsError("say who acts: either --model or --script")
    tokens, turns = max_completion_tokens, max_turns
    sampling = Sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, max_completion_tokens=tokens, max_turns=turns
    )
    _run(
        Options(
            tasks=tuple(task),
            output=output,
            model=model,
            script=script,
            episodes=episodes,
            seed=seed,
            sampling=sampling if model else None,
            system_prompt=system_prompt or None if model else None,
            device=device,
            batch=batch,
            parallel=parallel,
            retry_failed=retry_failed,
            label=label,
            workers=workers,
            worker_patience_seconds=worker_patience,
        )
    )


def _run(options: Options) -> None:
    from deploy.commands.resolve import stop_as_ctrl_c_does
    from deploy.evaluation_tables import as_json, report_table
    from deploy.evaluations import run_evaluation
    from deploy.exit_codes import ExitCode
    from deploy.terminal import errors
    from orchestrator.settings import load_settings
    from trainer.evaluation.report import summarize
    from trainer.evaluation.results import read_evaluation

    stop_as_ctrl_c_does()
    try:
        run_evaluation(options, load_settings())
    except KeyboardInterrupt:
        errors().print("interrupted; the same command goes on from here", markup=False)
        raise
    report = summarize(read_evaluation(options.output))
    text = as_json(report)
    (options.output / "report.json").write_text(text + "\n")
    errors().print(report_table(report), soft_wrap=False)
    typer.echo(text)
    if any(row.scored < report.episodes_per_task for row in report.by_task):
        raise typer.Exit(ExitCode.ABORTED)
