"""`rollout-farm train`: GRPO with TRL on the farm's episodes, a checkpoint and a JSON report."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.commands.examples import examples

if TYPE_CHECKING:
    from orchestrator.settings import Settings
    from trainer.environment import OnAbort
    from trainer.training import TrainingPlan


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "rollout-farm train --model Qwen/Qwen3-0.6B",
            "rollout-farm train --model ./my-model --cpu --max-steps 3 > report.json",
            "rollout-farm train --model ./my-model --tasks tasks.jsonl --completions 8 --batch-size 16 --max-steps 200 "
            "--on-abort exclude",
            "rollout-farm train --model ./my-model --resume --max-steps 400",
        )
    )(train)


def train(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(envvar="MODEL_PATH", help="A Transformers checkpoint or model id whose template has tools.")
    ],
    tasks: Annotated[
        list[str] | None, typer.Option(help="Task files (.json, .jsonl) or built-in names (weekly-sales); repeatable.")
    ] = None,
    max_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, those of a resumed run included.")] = 1,
    completions: Annotated[int, typer.Option(min=2, help="Completions of one prompt, compared with each other.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Completions of one step in one process.")] = 2,
    max_completion_length: Annotated[int, typer.Option(min=1, help="Tokens, tool results included.")] = 512,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Of the optimizer.")] = 1e-6,
    on_abort: Annotated[
        str, typer.Option(help="An episode that our side lost: 'raise' ends the run, 'exclude' leaves it out.")
    ] = "raise",
    output_dir: Annotated[Path, typer.Option(help="Checkpoint, metrics, receipts and report.")] = Path(
        "training-output"
    ),
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between two states that --resume can use.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of sampling and shuffling.")] = 42,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Workers to start when no farm is running.")] = 2,
    *,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the processor; without it a GPU with BF16.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest state there; what is not given is as it was.")
    ] = False,
) -> None:
    """Train a model on tasks: bars and signals on standard error, the report as JSON on standard output.

    Uses the farm that REDIS_URL or a running `rollout-farm up` names; else starts one for this run. Writes to the
    output directory: checkpoint/ (the model), checkpoint-N/ (states to resume), plan.json (these options),
    metrics.jsonl, receipts.jsonl and report.json. Ctrl-C ends the run's episodes and their sandboxes first.
    """
    from deploy.commands.resolve import stop_as_ctrl_c_does
    from deploy.logs import start_logging
    from orchestrator.settings import load_settings
    from orchestrator.tasks import load_tasks

    stop_as_ctrl_c_does()
    given = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}
    values = {**context.params, "output_dir": output_dir, "on_abort": _policy(on_abort)}
    options = _as_it_was(output_dir, values, given) if resume else values
    names = options["tasks"] or ["weekly-sales"]
    chosen = [found for name in names for found in load_tasks(name)]
    settings = load_settings()
    start_logging(settings)
    require_training()
    from trainer.training import TrainingPlan

    told = {it.name: options[it.name] for it in fields(TrainingPlan) if it.name in options and it.name != "tasks"}
    plan = TrainingPlan(tasks=chosen, task_names=tuple(names), **told)
    _run(plan, settings, workers)


def _as_it_was(directory: Path, values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """The options as they were given, else as the run in this directory had them."""
    from orchestrator.errors import SettingsError
    from trainer.kept_plan import kept_plan

    kept = kept_plan(directory)
    if kept is None:
        return values
    if not values["tasks"] and not kept.task_names:
        raise SettingsError(f"{directory}: its run was not told the names of its tasks; give them with --tasks")
    was = {**kept.options.model_dump(), "tasks": kept.task_names}
    return {**values, **{name: was[name] for name in was.keys() - given}}


def require_training() -> None:
    """Raise SettingsError when the extra `train` is not installed; quieten what its packages say on every import."""
    import os
    import warnings
    from importlib.util import find_spec

    from orchestrator.errors import SettingsError

    missing = [name for name in ("torch", "transformers", "datasets", "trl") if find_spec(name) is None]
    if missing:
        raise SettingsError(f"{', '.join(missing)}: not installed; install with: pip install 'rollout-farm[train]'")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # what it warns of is pinned by our tests
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)


def _run(plan: TrainingPlan, settings: Settings, workers: int) -> None:
    import contextlib
    import os

    from deploy.local_farm import LocalFarm
    from deploy.terminal import errors
    from deploy.training_report import NoBars, TrainingBars, as_text, report, signal_table
    from trainer.output_directory import OutputDirectory
    from trainer.training import checkpoint_of, tokenizer_of, train

    first = os.environ.get("RANK", "0") == "0"
    with OutputDirectory(plan.output_dir) if first else contextlib.nullcontext():
        checkpoint_of(plan)
    tokenizer_of(plan)  # what is wrong with either is said before a farm is started
    with contextlib.ExitStack() as stack:
        check = None
        resolved = _farm_settings(settings, several=int(os.environ.get("WORLD_SIZE", "1")) > 1)
        if resolved is None:
            farm = stack.enter_context(LocalFarm(settings, workers=workers, temporary=True))
            resolved, check = farm.settings, farm.check
        watcher = stack.enter_context(TrainingBars()) if first else NoBars()
        result = train(plan, resolved, watcher, check=check)
    if not result.main:
        return
    found = report(
        run_id=result.run_id,
        model=plan.model,
        checkpoint=str(result.checkpoint),
        steps=result.steps,
        metrics=result.metrics,
        receipts=result.receipts,
    )
    text = as_text(found)
    (plan.output_dir / "report.json").write_text(text + "\n")
    typer.echo(text)
    errors().print(signal_table(result.metrics), soft_wrap=False)
    for line in found["advice"]:
        errors().print(f"look at this: {line}", markup=False)


def _policy(name: str) -> OnAbort:
    from orchestrator.errors import SettingsError

    policies: dict[str, OnAbort] = {"raise": "raise", "exclude": "exclude"}
    if name not in policies:
        raise SettingsError(f"--on-abort is 'raise' or 'exclude', not {name!r}")
    return policies[name]


def _farm_settings(settings: Settings, *, several: bool) -> Settings | None:
    """Settings that reach a farm; None when this process has to start one."""
    from deploy.embedded import running_stack
    from orchestrator.errors import SettingsError

    found = running_stack(settings) or settings
    if found.redis_url is not None:
        return found
    if several:
        raise SettingsError("several processes train on one farm: start it first (rollout-farm up) or set REDIS_URL")
    return None
