"""What one evaluation says: scores from scored episodes; failures, latency and cost each on their own. Pure.

A task's score is the mean reward of its scored episodes, the evaluation's is the mean over tasks. A task without a
scored episode has no score and is in no mean; it is named instead.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from orchestrator.cost import usd
from trainer.evaluation.identity import Subject
from trainer.evaluation.results import EpisodeResult, Evaluation
from trainer.evaluation.statistics import Interval, Spread, bootstrap_mean, mean, pass_at_k, spread


@dataclass(frozen=True)
class Estimate:
    """A mean over `tasks` tasks, and its interval where there are at least two."""

    value: float
    interval: Interval | None
    tasks: int


@dataclass(frozen=True)
class TaskReport:
    """One task's episodes; score is None when none was scored."""

    task_id: str
    scored: int
    solved: int
    score: float | None
    failures: int


@dataclass(frozen=True)
class Failures:
    """Infrastructure failures: episodes that ended without a score, those that a retry made good included."""

    count: int
    share: float
    """Of all episodes that ended."""
    outcomes: Mapping[str, int]
    unscored_tasks: tuple[str, ...]


@dataclass(frozen=True)
class Latency:
    """Seconds of scored episodes."""

    queue: Spread | None
    """Waiting for a slot and a permit; depends on what else the farm does."""
    episode: Spread | None
    """From there to the receipt; generation is part of it."""
    generation: Spread | None


@dataclass(frozen=True)
class Cost:
    """US dollars of sandboxes; models and their hardware are not in it."""

    total_usd: Decimal
    scored_usd: Decimal
    failures_usd: Decimal
    interrupted_usd: Decimal
    """Of episodes that an interruption of the evaluation ended; they are no failures and run again."""
    per_scored_episode_usd: Decimal | None


@dataclass(frozen=True)
class Effort:
    """Mean tool calls, turns and generated tokens of a scored episode."""

    tool_calls: float | None
    turns: float | None
    completion_tokens: float | None


@dataclass(frozen=True)
class Report:
    """All that an evaluation says."""

    evaluation_id: str
    subject: Subject
    tasks: int
    episodes_per_task: int
    scored: int
    missing: int
    """Episodes that have not ended yet: the evaluation was interrupted."""
    score: Estimate | None
    pass_at: Mapping[int, Estimate]
    outcomes: Mapping[str, int]
    failures: Failures
    latency: Latency
    cost: Cost
    effort: Effort
    by_task: tuple[TaskReport, ...]


def summarize(evaluation: Evaluation) -> Report:
    """The report of an evaluation, complete or not."""
    identity, results = evaluation.identity, evaluation.results
    scored = [result for result in results if result.reward is not None]
    by_task = task_reports(evaluation)
    return Report(
        evaluation_id=identity.evaluation_id,
        subject=identity.subject,
        tasks=len(identity.tasks),
        episodes_per_task=identity.episodes,
        scored=len(scored),
        missing=evaluation.missing(),
        score=_estimate([row.score for row in by_task if row.score is not None]),
        pass_at=_pass_at(by_task, identity.episodes),
        outcomes=dict(sorted(Counter(str(result.outcome) for result in scored).items())),
        failures=_failures(results, by_task),
        latency=Latency(
            queue=spread([result.queue_seconds for result in scored]),
            episode=spread([result.episode_seconds for result in scored]),
            generation=spread([result.usage.generation_seconds for result in scored if result.usage]),
        ),
        cost=_cost(evaluation),
        effort=Effort(
            tool_calls=_mean_of(scored, lambda result: result.tool_calls),
            turns=_mean_of(scored, lambda result: result.usage.turns if result.usage else None),
            completion_tokens=_mean_of(scored, lambda result: result.usage.completion_tokens if result.usage else None),
        ),
        by_task=by_task,
    )


def task_reports(evaluation: Evaluation) -> tuple[TaskReport, ...]:
    """One row a task, in the identity's order."""
    rows = []
    for place, task in enumerate(evaluation.identity.tasks):
        own = [result for result in evaluation.results if result.task == place]
        rewards = [result.reward for result in own if result.reward is not None]
        rows.append(
            TaskReport(
                task_id=task.id,
                scored=len(rewards),
                solved=sum(result.solved for result in own),
                score=mean(rewards) if rewards else None,
                failures=len(own) - len(rewards),
            )
        )
    return tuple(rows)


def _pass_at(by_task: Sequence[TaskReport], episodes: int) -> dict[int, Estimate]:
    """For k = 1, 2, 4, ... and the number of episodes; a task with fewer than k scored episodes is left out."""
    powers = itertools.takewhile(lambda k: k < episodes, (2**power for power in itertools.count()))
    found = {}
    for k in [*powers, episodes]:
        values = [pass_at_k(row.scored, row.solved, k) for row in by_task if row.scored >= k]
        if (estimate := _estimate(values)) is not None:
            found[k] = estimate
    return found


def _estimate(values: Sequence[float]) -> Estimate | None:
    return Estimate(mean(values), bootstrap_mean(values), len(values)) if values else None


def _failures(results: Sequence[EpisodeResult], by_task: Iterable[TaskReport]) -> Failures:
    failed = [result for result in results if result.reward is None]
    return Failures(
        count=len(failed),
        share=len(failed) / len(results) if results else 0.0,
        outcomes=dict(sorted(Counter(str(result.outcome) for result in failed).items())),
        unscored_tasks=tuple(row.task_id for row in by_task if row.score is None),
    )


def _cost(evaluation: Evaluation) -> Cost:
    scored = [result.cost_picousd for result in evaluation.results if result.reward is not None]
    failed = [result.cost_picousd for result in evaluation.results if result.reward is None]
    interrupted = [episode.cost_picousd for episode in evaluation.interrupted]
    return Cost(
        total_usd=usd(sum(scored) + sum(failed) + sum(interrupted)),
        scored_usd=usd(sum(scored)),
        failures_usd=usd(sum(failed)),
        interrupted_usd=usd(sum(interrupted)),
        per_scored_episode_usd=usd(sum(scored)) / len(scored) if scored else None,
    )


def _mean_of(results: Iterable[EpisodeResult], amount: Callable[[EpisodeResult], float | None]) -> float | None:
    amounts = [value for result in results if (value := amount(result)) is not None]
    return mean(amounts) if amounts else None
