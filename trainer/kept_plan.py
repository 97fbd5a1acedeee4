"""What a training run was told, kept beside what it writes: a resumed run needs none of it again.

    <directory>/plan.json   the options, the tasks' ids and digests, and the names that they were read from

What always holds: an option that is not given to a resumed run is as it was; one that is given and differs is said;
what decides which task comes when, and what is compared with what (tasks, completions, seed), is as it was or the run
is refused. Tasks are kept by their digests: nothing that is held out is in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.errors import SettingsError
from orchestrator.tasks import Task, builtin_names
from trainer.environment import OnAbort

PLAN = "plan.json"

_Count = Annotated[int, Field(ge=1)]
_FIXED = {
    "completions": "it decides what is compared with what",
    "seed": "it decides which task comes when",
}
_MOVED = "the place among the tasks is counted in steps of the new size: some may come twice before others come again"


class Options(BaseModel):
    """The options of `TrainingPlan` that are the run's and not the machine's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_steps: _Count
    completions: _Count
    batch_size: _Count
    max_completion_length: _Count
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    on_abort: OnAbort
    save_steps: _Count
    seed: Annotated[int, Field(ge=0, lt=2**32)]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Options:
        """Of whatever has them among others; raises SettingsError for what could not be read back."""
        try:
            return cls.model_validate({name: values[name] for name in cls.model_fields})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise SettingsError(f"{name}: {first['msg']}, got {first['input']!r}") from None


class KeptPlan(BaseModel):
    """One run's `plan.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    options: Options
    processes: _Count
    tasks: Annotated[tuple[tuple[str, str], ...], Field(min_length=1)]
    """Id and digest, in order."""
    task_names: tuple[str, ...]
    """Files, by absolute path, and built-in names; empty when the run was not told by name."""

    def refuse_other(self, options: Options, tasks: Sequence[Task]) -> None:
        """Raise SettingsError when the run cannot go on with these."""
        for name, why in _FIXED.items():
            was, given = getattr(self.options, name), getattr(options, name)
            if given != was:
                raise SettingsError(
                    f"--{name} {given}: this run has {was}, and {why}; leave it out to go on as it was, or {_ANEW}"
                )
        if (other := _other_tasks(self.tasks, identities(tasks))) is not None:
            raise SettingsError(
                f"these are not the tasks of this run ({other}); give the tasks as they were, or {_ANEW}"
            )

    def changes(self, options: Options, processes: int) -> list[str]:
        """What is no longer as it was, a line each."""
        found = []
        for name in Options.model_fields:
            was, given = getattr(self.options, name), getattr(options, name)
            if given != was:
                found.append(f"going on with --{name.replace('_', '-')} {given}, it was {was}")
        if processes != self.processes:
            found.append(f"going on with {processes} processes, it was {self.processes}")
        if options.batch_size * processes != self.options.batch_size * self.processes:
            found.append(_MOVED)
        return found


_ANEW = "train from its last state in a new run: --model DIRECTORY/checkpoint-N with another --output-dir"


def kept_plan(directory: Path) -> KeptPlan | None:
    """The plan of the run in this directory; None when it keeps none. Raises SettingsError for one that is damaged."""
    path = directory / PLAN
    try:
        return KeptPlan.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise SettingsError(
            f"{path}: is no run's plan ({why}); remove it, and give --resume all options that the run was started with"
        ) from None


def keep_plan(directory: Path, plan: KeptPlan) -> None:
    """Write it, whole or not at all."""
    fresh = directory / f"{PLAN}.new"
    fresh.write_text(plan.model_dump_json(indent=2) + "\n")
    fresh.replace(directory / PLAN)


def identities(tasks: Sequence[Task]) -> tuple[tuple[str, str], ...]:
    """Id and digest of each."""
    return tuple((task.id, task.digest()) for task in tasks)


def lasting_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of tasks as they can be read from any working directory."""
    return tuple(name if name in builtin_names() else str(Path(name).absolute()) for name in names)


def _other_tasks(was: Sequence[tuple[str, str]], given: Sequence[tuple[str, str]]) -> str | None:
    if list(was) == list(given):
        return None
    if len(was) != len(given):
        return f"{len(given)} tasks, and it has {len(was)}"
    place, ours, theirs = next((n, a, b) for n, (a, b) in enumerate(zip(was, given, strict=True), 1) if a != b)
    return f"task {place} is {theirs[0]} and was {ours[0]}" if ours[0] != theirs[0] else f"{ours[0]} has been changed"
