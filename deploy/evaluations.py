"""Putting an evaluation together: the policy, the farm, the results file and the progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.embedded import running_stack
from deploy.local_farm import LocalFarm
from deploy.terminal import errors
from orchestrator.errors import SettingsError
from orchestrator.limiter import Capacity
from orchestrator.pool import Pool
from orchestrator.settings import Settings
from orchestrator.tasks import Task, TaskError, load_tasks
from trainer.evaluation.collection import Collector, Planned, plan
from trainer.evaluation.identity import Identity, Sampling, Subject, TaskIdentity
from trainer.evaluation.policies import Policy, ScriptPolicy
from trainer.evaluation.results import EpisodeResult, ResultsFile

_SLOTS_EXPECTED = 32
"""Episodes at once where no worker is alive yet; those that are too many wait in the queue."""


@dataclass(frozen=True)
class Options:
    """What a user asked for; see the command's help."""

    tasks: tuple[str, ...]
    output: Path
    model: str | None
    script: str | None
    episodes: int
    seed: int
    sampling: Sampling | None
    system_prompt: str | None
    device: str | None
    batch: int
    parallel: int | None
    retry_failed: bool
    label: str
    workers: int
    worker_patience_seconds: float


def run_evaluation(options: Options, settings: Settings) -> None:
    """Run what is left of the evaluation; its results file says what came of it."""
    tasks = _tasks(options.tasks)
    policy, subject, tools = _policy(options, tasks)
    identity = Identity(
        subject=subject,
        label=options.label,
        tasks=tuple(TaskIdentity.of(task) for task in tasks),
        episodes=options.episodes,
        seed=options.seed,
        sampling=options.sampling,
        system_prompt=options.system_prompt,
        tools=tools,
        template=settings.template,
        budgets=settings.budgets,
    )
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(ResultsFile(options.output, identity))
        left = plan(identity, file.results, retry_failed=options.retry_failed)
        if file.results:
            errors().print(f"going on: {len(file.results)} results are there, {len(left)} episodes left", markup=False)
        if not left:
            return
        resolved, check = running_stack(settings) or settings, _nothing
        if resolved.redis_url is None:
            farm = stack.enter_context(LocalFarm(settings, workers=options.workers, temporary=True))
            resolved, check = farm.settings, farm.check
        pool = stack.enter_context(Pool(resolved, run_id=identity.run_id))
        _collect(pool, identity, tasks, policy, file, left, check, options)


def _collect(
    pool: Pool,
    identity: Identity,
    tasks: Sequence[Task],
    policy: Policy[Any],
    file: ResultsFile,
    left: Sequence[Planned],
    check: Callable[[], None],
    options: Options,
) -> None:
    capacity = pool.capacity()
    if not capacity.live_slots:
        errors().print(
            f"no worker is alive yet; waiting {options.worker_patience_seconds:g} s for one (rollout-farm worker starts"
            " one)",
            markup=False,
        )
    places, notes = places_of(options.parallel, batch=policy.batch, capacity=capacity)
    for note in notes:
        errors().print(note, markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors(), transient=False) as bar:
        row = bar.add_task("episodes", total=len(left))

        def keep(result: EpisodeResult) -> None:
            file.add(result)
            bar.advance(row)

        collector = Collector(
            pool,
            identity,
            tasks,
            policy,
            keep=keep,
            keep_interrupted=file.add_interrupted,
            check=check,
            worker_patience_seconds=options.worker_patience_seconds,
        )
        collector.collect(left, parallel=places)


def places_of(parallel: int | None, *, batch: int, capacity: Capacity) -> tuple[int, list[str]]:
    """How many episodes are submitted at once, and what the user has to know of that.

    By default as many as the farm runs and the policy answers at once: more would spend their policy windows waiting
    for each other's answers. What is asked for is done, whatever comes of it.
    """
    fitting = min(capacity.live_slots or _SLOTS_EXPECTED, capacity.concurrency_limit)
    if parallel is None:
        return max(1, min(fitting, batch)), []
    notes = []
    if min(parallel, fitting) > batch:
        notes.append(
            f"--parallel {parallel} is more than the --batch of {batch}: episodes wait for each other's answers "
            f"and may run out of time, which scores 0; add --batch {parallel}, or leave --parallel out"
        )
    if parallel > fitting:
        notes.append(
            f"--parallel {parallel} is more than the farm runs at once ({capacity.live_slots} live slots, limit "
            f"{capacity.concurrency_limit}): the others wait for their turn, which costs none of their time; add "
            "workers (rollout-farm worker) or raise the limit (rollout-farm limits)"
        )
    return parallel, notes


def _tasks(names: Sequence[str]) -> list[Task]:
    tasks = [task for name in names for task in load_tasks(name)]
    twice = sorted({task.id for task in tasks if sum(other.id == task.id for other in tasks) > 1})
    if twice:
        raise TaskError([f"task {name}: is named twice; give each task of an evaluation its own id" for name in twice])
    return tasks


def _policy(options: Options, tasks: Sequence[Task]) -> tuple[Policy[Any], Subject, str | None]:
    """The policy, what identifies it, and the digest of the tools it is shown."""
    if options.model is None:
        assert options.script is not None
        script = ScriptPolicy(options.script)
        script.check(tasks)
        return script, script.subject, None
    try:
        from trainer.evaluation.chat_model import ChatModel, load_chat_model
    except ModuleNotFoundError as error:
        raise SettingsError(f"--model needs {error.name}: pip install 'rollout-farm[train]'") from None
    from trainer.evaluation.tools import TOOLS

    model, tokenizer, subject = load_chat_model(options.model, device=options.device)
    assert options.sampling is not None
    chat = ChatModel(
        model, tokenizer, options.sampling, tools=TOOLS, system_prompt=options.system_prompt, batch=options.batch
    )
    chat.check(tasks)
    return chat, subject, chat.tools_digest


def _nothing() -> None:
    return None
