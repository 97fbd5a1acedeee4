"""What was run: one frozen record of everything that an evaluation's result may depend on.

What always holds: the same record gives the same id, episode ids and seeds; `differences` looks at every field but the
policy's own (`subject`) and the label, so that a field added here is compared without further doing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from orchestrator.settings import Budgets
from orchestrator.tasks import Task

_PARTS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "starter files": ("files",),
    "held-out data": ("verification", "expected"),
    "judging": ("artifact", "command", "grader"),
    "sandbox and budgets": ("template", "network", "envs", "budgets"),
}
"""What a difference between two tasks of one id is called, and the task's fields behind it."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Subject(_Record):
    """The policy that was evaluated: what a comparison is about."""

    kind: Literal["model", "script"]
    name: str
    """The model's path or hub id; the script's name."""
    fingerprint: str
    """SHA-256 of the model's weights, configuration and tokenizer, or of the script's name."""
    chat_template: str | None = None
    """SHA-256 of the chat template that prompts were rendered with."""
    dtype: str | None = None


class Sampling(_Record):
    """How a model was sampled; tokens and turns are a whole episode's."""

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 switches it off."""
    max_completion_tokens: Annotated[int, Field(ge=1)] = 512
    """All that follows the prompt, observations included, as in training."""
    max_turns: Annotated[int, Field(ge=1)] = 16


class TaskIdentity(_Record):
    """One task, and digests of its parts that say what differs when it is another."""

    id: str
    digest: str
    parts: dict[str, str]

    @classmethod
    def of(cls, task: Task) -> TaskIdentity:
        """The identity of `task`."""
        body = task.model_dump(mode="json")
        parts = {name: _digest({field: body[field] for field in fields})[:16] for name, fields in _PARTS.items()}
        return cls(id=task.id, digest=task.digest(), parts=parts)


class Identity(_Record):
    """An evaluation: one policy over tasks, `episodes` times each."""

    schema_version: Literal[1] = 1
    subject: Subject
    label: str = ""
    """Tells repetitions of one evaluation apart; compared with nothing."""
    tasks: Annotated[tuple[TaskIdentity, ...], Field(min_length=1)]
    episodes: Annotated[int, Field(ge=1)]
    """Of each task."""
    seed: int = 0
    sampling: Sampling | None = None
    """None for a script."""
    system_prompt: str | None = None
    tools: str | None = None
    """SHA-256 of the tool descriptions that the model was shown."""
    template: str
    """Of the sandboxes, where a task names none of its own."""
    budgets: Budgets

    @property
    def evaluation_id(self) -> str:
        """16 hexadecimal digits; also in the id of each episode."""
        return _digest(self.model_dump(mode="json"))[:16]

    @property
    def run_id(self) -> str:
        """The run that the evaluation's episodes belong to."""
        return f"eval-{self.evaluation_id}"

    def episode_id(self, task: int, sample: int, retry: int = 0) -> str:
        """The id of one episode: task by its place in `tasks`, sample below `episodes`."""
        return f"{self.run_id}-{task}-{sample}-{retry}"

    def episode_seed(self, task: int, sample: int) -> int:
        """The seed of one episode's sampling, below 2**63; the same for every policy."""
        return int(_digest([self.seed, self.tasks[task].id, sample])[:15], 16)


def differences(first: Identity, second: Identity) -> list[str]:
    """What was not alike, one line each, the policy aside; empty when the two can be compared."""
    return [*_task_differences(first.tasks, second.tasks), *_field_differences(first, second)]


def notes(first: Identity, second: Identity) -> list[str]:
    """What of the policies themselves is worth knowing when they are compared."""
    found = []
    if first.subject.fingerprint == second.subject.fingerprint:
        found.append("both evaluations are of the same policy: the difference is noise")
    if first.subject.chat_template != second.subject.chat_template:
        found.append("the models have different chat templates: the same messages were rendered differently")
    if first.subject.dtype != second.subject.dtype:
        found.append(f"the models ran in different precision: {first.subject.dtype} and {second.subject.dtype}")
    return found


def _task_differences(first: Sequence[TaskIdentity], second: Sequence[TaskIdentity]) -> Iterator[str]:
    ours, theirs = ({task.id: task for task in tasks} for tasks in (first, second))
    for missing, where in ((ours.keys() - theirs.keys(), "first"), (theirs.keys() - ours.keys(), "second")):
        if missing:
            yield f"tasks only in the {where}: {_some(sorted(missing))}"
    for name in ours:
        if name in theirs and ours[name].digest != theirs[name].digest:
            parts = [part for part in _PARTS if ours[name].parts.get(part) != theirs[name].parts.get(part)]
            yield f"task {name}: {', '.join(parts) or 'scripts or visible answers'} differ"
    if list(ours) != list(theirs) and ours.keys() == theirs.keys():
        yield "the tasks are in another order"


def _field_differences(first: Identity, second: Identity) -> Iterator[str]:
    ours, theirs = (_flat(identity.model_dump(mode="json")) for identity in (first, second))
    for name in sorted(ours.keys() | theirs.keys()):
        if name.split(".")[0] in ("subject", "label", "tasks"):
            continue
        if (one := ours.get(name)) != (other := theirs.get(name)):
            yield f"{name}: {_shown(one)} and {_shown(other)}"


def _flat(body: dict[str, Any], prefix: str = "") -> dict[str, JsonValue]:
    flat: dict[str, JsonValue] = {}
    for name, value in body.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _shown(value: JsonValue) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def text_digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
