"""What came of each episode of an evaluation, and the file that keeps it.

    <directory>/results.jsonl   first line {"identity": ...}, then one result a line, each written when it is known;
                                {"interrupted": ...} is what an episode cost that an interruption ended

What always holds: a file has one identity, and one writer at a time; a line that a crash cut short is dropped and its
episode counts as not run; what is read could have been written: a place of the identity, once, with the reward of its
outcome.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from orchestrator.errors import FarmError
from orchestrator.records import SettledReceipt
from orchestrator.vocabulary import Outcome, Phase
from trainer.evaluation.identity import Identity, differences

RESULTS = "results.jsonl"

_INTERRUPTED = "interrupted"


_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Usage(BaseModel):
    """What a policy spent on one episode; tokens are 0 for a script."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    turns: _Count
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    """Generated ones; observations are not among them."""
    generation_seconds: _Seconds = 0.0
    """Time in which the episode waited for the model, its batch's neighbours included."""


class EpisodeResult(BaseModel):
    """One episode of an evaluation: a reward, or none and an infrastructure failure. Seconds, pico-dollars."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: _Count
    """Its place in the identity's tasks."""
    task_id: str
    sample: _Count
    retry: _Count
    episode_id: str
    outcome: Outcome
    reward: float | None
    detail: str | None = None
    queue_seconds: _Seconds
    """Until a slot took it and it had its permit."""
    episode_seconds: _Seconds
    """From there to its receipt."""
    tool_calls: _Count
    usage: Usage | None
    """None when the result was taken from a receipt that an interrupted evaluation left."""
    cost_picousd: _Count
    resources: tuple[str, ...]
    """The sandboxes that it had, such as `policy 2 vCPU 512 MiB`."""

    @model_validator(mode="after")
    def _reward_is_its_outcomes(self) -> Self:
        if self.reward != self.outcome.score:
            raise ValueError(f"the reward of {self.outcome} is {self.outcome.score}, not {self.reward}")
        return self

    @property
    def solved(self) -> bool:
        """Whether the episode has the full reward."""
        return self.outcome is Outcome.SOLVED

    @classmethod
    def of(cls, settled: SettledReceipt, usage: Usage | None, *, task: int, sample: int, retry: int) -> EpisodeResult:
        """The result that a receipt tells."""
        receipt = settled.receipt
        waited = sum(receipt.phases.get(phase, 0.0) for phase in (Phase.QUEUE, Phase.ADMISSION))
        sizes = {f"{row.role} {row.vcpus} vCPU {row.memory_mb} MiB" for row in settled.allocations if row.vcpus}
        return cls(
            task=task,
            task_id=receipt.task_id,
            sample=sample,
            retry=retry,
            episode_id=receipt.episode_id,
            outcome=receipt.outcome,
            reward=receipt.reward,
            detail=receipt.detail,
            queue_seconds=max(0.0, waited),
            episode_seconds=max(0.0, receipt.finished_at - receipt.queued_at - waited),
            tool_calls=sum(1 for step in receipt.operations if step.name == "terminal"),
            usage=usage,
            cost_picousd=settled.cost_picousd,
            resources=tuple(sorted(sizes)),
        )


class Interrupted(BaseModel):
    """An episode that an interruption of its evaluation ended: no result, and yet it cost something."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    episode_id: str
    cost_picousd: _Count


@dataclass(frozen=True)
class Evaluation:
    """An evaluation as its file tells it."""

    identity: Identity
    results: tuple[EpisodeResult, ...]
    interrupted: tuple[Interrupted, ...] = ()

    def missing(self) -> int:
        """How many episodes have neither a score nor a failure yet."""
        ended = {(result.task, result.sample) for result in self.results}
        return len(self.identity.tasks) * self.identity.episodes - len(ended)


class ResultsFile:
    """The results of one evaluation, open for writing. Use as a context manager."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        self.path = directory / RESULTS
        self.identity = identity
        self.results: list[EpisodeResult] = []
        self.interrupted: list[Interrupted] = []
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Open or go on; raises FarmError when another process writes, or when the file is of another evaluation."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise FarmError(f"{self.path}: cannot be written: {error.strerror}; choose another --output") from None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, result: EpisodeResult) -> None:
        """Keep one result, on disk when this returns."""
        self._write(result.model_dump(mode="json"))
        self.results.append(result)

    def add_interrupted(self, episode: Interrupted) -> None:
        """Keep what an interruption cost; an episode that is there already is not written again."""
        if all(episode.episode_id != known.episode_id for known in self.interrupted):
            self._write({_INTERRUPTED: episode.model_dump(mode="json")})
            self.interrupted.append(episode)

    def close(self) -> None:
        """Let go of the file. Can be called again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin(self) -> None:
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FarmError(
                f"{self.path}: another process is writing it; wait for it, or choose another --output"
            ) from None
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        os.ftruncate(self._descriptor, whole)
        if not whole:
            self._write({"identity": self.identity.model_dump(mode="json")})
            return
        found = _parse(self.path, content[:whole])
        if (there := found.identity) != self.identity:
            what = [*_subject_differences(there, self.identity), *differences(there, self.identity)]
            raise FarmError(
                f"{self.path} belongs to another evaluation: {'; '.join(what)}. Go on with what it was started with, "
                "or choose another --output"
            )
        self.results, self.interrupted = list(found.results), list(found.interrupted)

    def _write(self, body: dict[str, Any]) -> None:
        assert self._descriptor is not None
        line = json.dumps(body).encode() + b"\n"
        before = os.fstat(self._descriptor).st_size
        written = os.write(self._descriptor, line)
        if written < len(line):  # no error, and half a line that would spoil the next
            os.ftruncate(self._descriptor, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.fsync(self._descriptor)


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation that a directory or a results file holds; raises FarmError when it is none."""
    file = path / RESULTS if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise FarmError(f"{file}: {error.strerror}; name the --output directory of a `rollout-farm evaluate`") from None
    return _parse(file, content[: content.rfind(b"\n") + 1])


def _parse(path: Path, content: bytes) -> Evaluation:
    lines = content.splitlines()
    if not lines:
        raise FarmError(f"{path}: is empty; run the evaluation again")
    number = 1
    try:
        identity = _identity(json.loads(lines[0]))
        results: dict[tuple[int, int, int], EpisodeResult] = {}
        scored: set[tuple[int, int]] = set()
        interrupted: dict[str, Interrupted] = {}
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007 - named by the errors below
            if line.startswith(f'{{"{_INTERRUPTED}"'.encode()):
                cut = Interrupted.model_validate(json.loads(line)[_INTERRUPTED])
                if cut.episode_id in interrupted:
                    raise ValueError(f"{cut.episode_id} is there already")
                interrupted[cut.episode_id] = cut
                continue
            result = EpisodeResult.model_validate_json(line)
            place = (result.task, result.sample)
            if problem := _misplaced(identity, result):
                raise ValueError(problem)
            if (*place, result.retry) in results or place in scored:
                raise ValueError(f"task {result.task}, sample {result.sample} has a result already")
            results[*place, result.retry] = result
            if result.reward is not None:
                scored.add(place)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FarmError(
            f"{path}:{number}: is no line of an evaluation ({_reason(error)}); move the file away and run it again"
        ) from None
    except _OtherVersion as error:
        raise FarmError(f"{path}:{number}: {error}") from None
    return Evaluation(identity, tuple(results.values()), tuple(interrupted.values()))


class _OtherVersion(Exception):
    """The file is an evaluation of a schema that this version does not read."""


def _identity(first: dict[str, Any]) -> Identity:
    found, ours = first["identity"]["schema_version"], Identity.model_fields["schema_version"].default
    if type(found) is int and found != ours:
        raise _OtherVersion(
            f"was written with schema version {found}, and this rollout-farm reads version {ours}; read it with the "
            "rollout-farm that wrote it, or move the file away and run it again"
        )
    return Identity.model_validate(first["identity"])


def _misplaced(identity: Identity, result: EpisodeResult) -> str | None:
    """Why the result is not of this evaluation."""
    if result.task >= len(identity.tasks):
        return f"task {result.task} is none of the evaluation's {len(identity.tasks)}"
    if result.sample >= identity.episodes:
        return f"sample {result.sample} is none of the {identity.episodes} of a task"
    if result.task_id != identity.tasks[result.task].id:
        return f"task {result.task} is {identity.tasks[result.task].id}, not {result.task_id}"
    # The run in front is not looked at: a field that a later version adds to the identity gives the run another id.
    if not result.episode_id.endswith(f"-{result.task}-{result.sample}-{result.retry}"):
        return f"{result.episode_id} is not the episode of this task, sample and retry"
    return None


def _reason(error: Exception) -> str:
    """One line of what is wrong."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, "))))
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error}"
    return str(error).splitlines()[0]


def _subject_differences(first: Identity, second: Identity) -> Sequence[str]:
    ours, theirs = first.subject.model_dump(), second.subject.model_dump()
    found = [f"{name}: {ours[name]} and {theirs[name]}" for name in ours if ours[name] != theirs[name]]
    return found + ([f"label: {first.label!r} and {second.label!r}"] if first.label != second.label else [])
