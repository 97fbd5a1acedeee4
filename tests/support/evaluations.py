"""Evaluations to test with: an identity over two tasks, and results as receipts would give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.settings import Budgets
from orchestrator.tasks import Task, load_builtin
from orchestrator.vocabulary import Outcome
from trainer.evaluation.identity import Identity, Sampling, Subject, TaskIdentity
from trainer.evaluation.results import EpisodeResult, Evaluation, Usage

SIZES = ("policy 2 vCPU 512 MiB", "verifier 2 vCPU 512 MiB")


def some_tasks(count: int = 2, **changes: Any) -> list[Task]:
    """The built-in task under several ids."""
    return [
        load_builtin("weekly-sales").model_copy(update={"id": f"task-{place}", **changes}) for place in range(count)
    ]


def an_identity(**changes: Any) -> Identity:
    """A model's evaluation."""
    given: dict[str, Any] = {
        "subject": Subject(kind="model", name="base", fingerprint="0" * 64, chat_template="1" * 64, dtype="float32"),
        "tasks": tuple(TaskIdentity.of(task) for task in some_tasks()),
        "episodes": 2,
        "sampling": Sampling(),
        "tools": "2" * 64,
        "template": "base",
        "budgets": Budgets(),
    }
    return Identity(**{**given, **changes})


def a_result(identity: Identity, task: int, sample: int, outcome: Outcome, **changes: Any) -> EpisodeResult:
    """What came of one episode."""
    given: dict[str, Any] = {
        "task": task,
        "task_id": identity.tasks[task].id,
        "sample": sample,
        "retry": 0,
        "episode_id": identity.episode_id(task, sample, changes.get("retry", 0)),
        "outcome": outcome,
        "reward": outcome.score,
        "queue_seconds": 0.5,
        "episode_seconds": 2.0,
        "tool_calls": 3,
        "usage": Usage(turns=4, prompt_tokens=10, completion_tokens=20, generation_seconds=0.1),
        "cost_picousd": 1_000_000,
        "resources": SIZES,
    }
    return EpisodeResult(**{**given, **changes})


def an_evaluation(
    outcomes: Mapping[int, Sequence[Outcome]] | Sequence[Sequence[Outcome]], **changes: Any
) -> Evaluation:
    """An evaluation in which task n had these outcomes."""
    rows = outcomes if isinstance(outcomes, Mapping) else dict(enumerate(outcomes))
    given: dict[str, Any] = {
        "tasks": tuple(TaskIdentity.of(task) for task in some_tasks(len(rows))),
        "episodes": max(map(len, rows.values())),
    }
    identity = an_identity(**{**given, **changes})
    results = [
        a_result(identity, task, sample, outcome)
        for task, ended in rows.items()
        for sample, outcome in enumerate(ended)
    ]
    return Evaluation(identity, tuple(results))
