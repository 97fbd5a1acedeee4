"""Two evaluations side by side: the paired difference per task, or a refusal that says what was not alike. Pure.

What always holds: only complete evaluations that differ in nothing but the policy are compared, in sandboxes of one
size; failures, latency and cost stand beside the difference and are no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.errors import FarmError
from orchestrator.vocabulary import Outcome
from trainer.evaluation.identity import differences, notes
from trainer.evaluation.report import Estimate, Report, summarize
from trainer.evaluation.results import Evaluation
from trainer.evaluation.statistics import bootstrap_mean, mean, paired_differences

FEWEST_TASKS = 6
"""Fewer decide nothing: a bootstrap of values of one sign never holds zero, and five tasks are of one sign by chance
more often than one time in twenty (2 / 2**5)."""


class NotAlike(FarmError):
    """Two evaluations cannot be compared; `.reasons` has a line for each thing that differs."""

    def __init__(self, reasons: Sequence[str]) -> None:
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        super().__init__(
            f"these evaluations were not run alike:\n{listed}\nrun one again with the other's tasks and settings"
        )
        self.reasons = tuple(reasons)


@dataclass(frozen=True)
class TaskDifference:
    """One task's two scores, and the second minus the first."""

    task_id: str
    first: float
    second: float
    difference: float


@dataclass(frozen=True)
class Comparison:
    """The second evaluation against the first."""

    first: Report
    second: Report
    difference: Estimate | None
    """Mean over tasks of the second's score minus the first's; None when no task has both."""
    better: int
    """Tasks on which the second scores higher."""
    worse: int
    by_task: tuple[TaskDifference, ...]
    left_out: tuple[str, ...]
    """Tasks without a scored episode on one side."""
    notes: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """Whether the interval of the difference leaves out zero, with enough tasks for it to mean something."""
        interval = self.difference.interval if self.difference else None
        return interval is not None and not self.too_few_tasks and (interval.low > 0 or interval.high < 0)

    @property
    def too_few_tasks(self) -> bool:
        """Whether fewer than `FEWEST_TASKS` tasks have a score on both sides: then nothing is decided."""
        return len(self.by_task) < FEWEST_TASKS


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Compare two evaluations; raises NotAlike when something other than the policy differs."""
    reasons = [*differences(first.identity, second.identity), *_resources(first, second), *_unfinished(first, second)]
    if reasons:
        raise NotAlike(reasons)
    ours, theirs = summarize(first), summarize(second)
    rows = [
        (one.task_id, one.score, other.score)
        for one, other in zip(ours.by_task, theirs.by_task, strict=True)
        if one.score is not None and other.score is not None
    ]
    found = paired_differences([row[1] for row in rows], [row[2] for row in rows])
    by_task = tuple(TaskDifference(*row, change) for row, change in zip(rows, found, strict=True))
    paired = {row.task_id for row in by_task}
    return Comparison(
        first=ours,
        second=theirs,
        difference=Estimate(mean(found), bootstrap_mean(found), len(found)) if found else None,
        better=sum(change > 0 for change in found),
        worse=sum(change < 0 for change in found),
        by_task=by_task,
        left_out=tuple(row.task_id for row in ours.by_task if row.task_id not in paired),
        notes=(*notes(first.identity, second.identity), *_out_of_time(ours, theirs)),
    )


def _out_of_time(first: Report, second: Report) -> Iterator[str]:
    """A slow model, or a machine that others use, gives zeros that are not the policy's choice of commands."""
    for name, report in (("first", first), ("second", second)):
        if count := report.outcomes.get(Outcome.WINDOW_EXHAUSTED, 0):
            yield (
                f"{name}: {count} of {report.scored} episodes ran out of time (window_exhausted): their zeros tell of "
                "the machine as well"
            )


def _resources(first: Evaluation, second: Evaluation) -> list[str]:
    """Sandbox sizes are the provider's to decide, so only the receipts know them; a role seen once says nothing."""
    ours, theirs = _sizes(first), _sizes(second)
    return [
        f"{role} sandboxes: {', '.join(sorted(ours[role]))} and {', '.join(sorted(theirs[role]))}"
        for role in sorted(ours.keys() & theirs.keys())
        if ours[role] != theirs[role]
    ]


def _sizes(evaluation: Evaluation) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for size in (size for result in evaluation.results for size in result.resources):
        role, _, text = size.partition(" ")
        found.setdefault(role, set()).add(text)
    return found


def _unfinished(first: Evaluation, second: Evaluation) -> list[str]:
    return [
        f"the {name} evaluation is not complete: {evaluation.missing()} episodes are missing; start it again to go on"
        for name, evaluation in (("first", first), ("second", second))
        if evaluation.missing()
    ]
