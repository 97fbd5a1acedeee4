"""The task: trusted data that says what an episode is about and how its result is judged.

Three audiences, kept apart by type. `sandbox_files()` is all that the policy sandbox gets; `verifier_files()`
is what the verifier gets beside the artifact; `expected`, `visible_expected` and `scripts` stay on the host.
The first two are different types, so that a checker refuses held-out files where starter files belong, and
nothing host-only is in a task's repr.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NewType

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
)

from orchestrator.errors import FarmError
from orchestrator.tasks.graders import expectation_problem, grader_problem
from orchestrator.tasks.paths import clash, home_path

FILE_BYTES = 64 * 1024
"""The farm's limit of one file transfer."""
COMMAND_BYTES = 96 * 1024
"""One bash argument holds 128 KiB; the rest is for what the farm wraps around a command."""
_MANY = 64
"""Files, variables or scripts of one task; a task is a message, not an archive."""
_SCRIPT_COMMANDS = 256

PolicyFiles = NewType("PolicyFiles", dict[str, str])
"""Absolute path -> text of what the policy sandbox starts with."""
VerifierFiles = NewType("VerifierFiles", dict[str, str])
"""Absolute path -> text of what the verifier gets beside the artifact; never for a policy sandbox."""


class TaskError(FarmError):
    """One or more tasks are wrong; `.problems` has one line for each thing to correct."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def _matches(pattern: str, expectation: str) -> AfterValidator:
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(expectation)
        return text

    return AfterValidator(check)


def _text_of(limit_bytes: int, *, blank: bool, nul: bool) -> AfterValidator:
    def check(text: str) -> str:
        if not blank and not text.strip():
            raise ValueError("must not be empty")
        if not nul and "\0" in text:
            raise ValueError("must not contain a NUL character")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise ValueError("holds a lone surrogate, which UTF-8 cannot carry") from None
        if size > limit_bytes:
            raise ValueError(f"must be at most {limit_bytes} bytes, has {size}")
        return text

    return AfterValidator(check)


def _no_clash(files: object) -> object:
    if isinstance(files, Mapping) and (problem := clash(path for path in files if isinstance(path, str))):
        raise ValueError(problem)
    return files


def _not_the_shells(name: str) -> str:
    """Refuse what the farm runs commands by, and what bash would take for its own options before it runs any."""
    if name in ("SHELLOPTS", "BASHOPTS", "POSIXLY_CORRECT"):
        raise ValueError("would change the shell that the farm runs commands by: set it in the commands instead")
    if name == "FARM_COMMAND" or name.startswith("_farm_"):
        raise ValueError("is a variable of the farm's own: choose another name")
    return name


TaskId = Annotated[str, _matches(r"[a-z0-9-]{1,40}", "must be 1 to 40 of a-z, 0-9 and '-'")]
Prompt = Annotated[str, _text_of(FILE_BYTES, blank=False, nul=True)]
FileText = Annotated[str, _text_of(FILE_BYTES, blank=True, nul=True)]
_Command = Annotated[str, _text_of(COMMAND_BYTES, blank=False, nul=False)]
_HomePath = Annotated[str, AfterValidator(home_path)]
_Files = Annotated[dict[_HomePath, FileText], Field(max_length=_MANY), BeforeValidator(_no_clash)]
_Script = Annotated[tuple[_Command, ...], Field(strict=False, max_length=_SCRIPT_COMMANDS)]
_VariableName = Annotated[
    str, _matches(r"[A-Za-z_][A-Za-z0-9_]*", "must be a name such as LANG"), AfterValidator(_not_the_shells)
]
_VariableText = Annotated[str, _text_of(8 * 1024, blank=True, nul=False)]
_Template = Annotated[str, _matches(r"[A-Za-z0-9._:/-]{1,100}", "must be a template's name or id")]
_LifeSeconds = Annotated[float, Field(ge=1, le=86_400, allow_inf_nan=False)]
"""No sandbox lives longer than 24 hours, and none is ready, used and deleted within a second."""
_CommandSeconds = Annotated[float, Field(ge=0.1, le=600, allow_inf_nan=False)]
"""One command: to start a shell takes hundredths of a second; what needs longer than this runs in the background."""


class TaskBudgets(BaseModel):
    """A task's own limits in seconds, where they differ from the farm's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy_window_seconds: _LifeSeconds | None = None
    deadline_seconds: _LifeSeconds | None = None
    command_seconds: _CommandSeconds | None = None
    verifier_command_seconds: _CommandSeconds | None = None

    @field_validator("deadline_seconds")
    @classmethod
    def _window_fits(cls, deadline: float | None, info: ValidationInfo) -> float | None:
        window = info.data.get("policy_window_seconds")
        if deadline is not None and window is not None and deadline <= window:
            raise ValueError("must be longer than policy_window_seconds: verifying and cleaning up take time")
        return deadline


class Task(BaseModel):
    """One task. Paths are absolute or relative to /home/user and are kept absolute."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    id: TaskId
    prompt: Prompt
    files: _Files
    """Starter files of the policy sandbox."""
    artifact: _HomePath
    """The one file that is exported and judged."""
    command: _Command
    """What the verifier runs, as a shell command."""
    verification: Annotated[_Files, Field(repr=False)]
    """Held-out files: uploaded to the verifier, never to a policy sandbox."""
    grader: str
    expected: JsonValue = Field(repr=False)
    """What the grader compares the verifier's run with; never leaves the host."""
    visible_expected: JsonValue = Field(default=None, repr=False)
    """What a right artifact gives on the starter files, for demos and checks; null when unsaid."""
    template: _Template | None = None
    """Of both sandboxes; the farm's when null."""
    network: bool = True
    """Whether the policy sandbox keeps its template's networking. The verifier is always offline."""
    envs: Annotated[dict[_VariableName, _VariableText], Field(max_length=_MANY)] = {}
    """Environment variables of both sandboxes: the policy can read them."""
    budgets: TaskBudgets | None = None
    scripts: Annotated[dict[TaskId, _Script], Field(max_length=_MANY, repr=False)] = {}
    """Scripted policies: name -> commands, after which the artifact is submitted."""

    @field_validator("verification")
    @classmethod
    def _keeps_the_artifact(cls, files: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        artifact = info.data.get("artifact")
        if artifact in files:
            raise ValueError(f"must not replace the artifact {artifact!r}, which is what gets judged")
        if artifact is not None and (problem := clash((artifact, *files))):
            raise ValueError(problem)
        return files

    @field_validator("grader")
    @classmethod
    def _known_grader(cls, grader: str) -> str:
        if problem := grader_problem(grader):
            raise ValueError(problem)
        return grader

    @field_validator("expected", "visible_expected")
    @classmethod
    def _fits_the_grader(cls, expected: JsonValue, info: ValidationInfo) -> JsonValue:
        grader = info.data.get("grader")
        unsaid = info.field_name == "visible_expected" and expected is None
        if grader is not None and not unsaid and (problem := expectation_problem(grader, expected)):
            raise ValueError(problem)
        return expected

    def sandbox_files(self) -> PolicyFiles:
        """All that a policy sandbox gets of this task: the starter files."""
        return PolicyFiles(dict(self.files))

    def verifier_files(self) -> VerifierFiles:
        """What the verifier gets beside the artifact: the held-out files."""
        return VerifierFiles(dict(self.verification))

    def digest(self) -> str:
        """SHA-256 of the task as canonical JSON, defaults left out: a new option changes no digest."""
        said = self.model_dump(mode="json", exclude_defaults=True) | {"schema_version": self.schema_version}
        text = json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()
