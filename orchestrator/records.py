"""The rows and messages that cross Redis, as frozen models. Times are unix seconds, money is integer pico-dollars."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from orchestrator.cost import usd_text
from orchestrator.settings import Budgets
from orchestrator.tasks import Task
from orchestrator.vocabulary import (
    SCHEMA_VERSION,
    AllocationState,
    Drive,
    Outcome,
    Role,
)

_ID = r"[a-z0-9-]{1,64}"
Id = Annotated[str, Field(pattern=f"^{_ID}$")]
EpisodeId = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,48}$")]
"""Shorter than other ids: `-a<attempt>-verifier` is appended and the whole still has to fit 64."""


def is_id(given: object) -> bool:
    """Whether a run, a group or an episode can be called so."""
    return isinstance(given, str) and re.fullmatch(_ID, given) is not None


class _Record(BaseModel):
    # An error that quotes what it was given would carry expectations into logs and into what RQ keeps of a job.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which UTF-8 cannot carry") from None
    return text


_Text = Annotated[str, AfterValidator(_encodable)]


class Script(_Record):
    """A policy that needs no model: commands one after another, then a submission."""

    kind: Literal["script"] = "script"
    name: _Text = "script"
    commands: tuple[_Text, ...] = ()
    submit: bool = True


class EpisodeSpec(_Record):
    """All that a worker needs to run one episode; carried by its job and kept in its row."""

    schema_version: Literal[1] = SCHEMA_VERSION
    episode_id: EpisodeId
    run_id: Id
    group_id: Id | None = None
    task: Task
    template: str
    drive: Drive
    policy: Script | None = None
    trainer_id: Id | None = None
    reservation_id: Id | None = None
    budgets: Budgets = Budgets()

    @model_validator(mode="after")
    def _drive_has_its_driver(self) -> EpisodeSpec:
        if self.drive is Drive.AUTONOMOUS and self.policy is None:
            raise ValueError("an autonomous episode needs a policy")
        if self.drive is Drive.REMOTE and self.trainer_id is None:
            raise ValueError("a remote episode needs the id of the trainer that drives it")
        return self


class Allocation(_Record):
    """One sandbox from intent to confirmed absence."""

    allocation_id: Id
    episode_id: Id
    role: Role
    state: AllocationState
    sandbox_id: str | None = None
    vcpus: int | None = None
    memory_mb: int | None = None
    longest_seconds: float | None = Field(default=None, exclude=True)
    """The longest that it can live and cost; no part of what is shown."""
    intended_at: float
    created_at: float | None = None
    unknown_at: float | None = None
    unresolved_at: float | None = None
    absent_at: float | None = None
    running_seconds: float | None = None
    cost_picousd: int | None = None
    detail: str | None = None


class Operation(_Record):
    """One step of an episode: what, how long, how it went."""

    name: str
    seconds: float
    ok: bool = True
    exit_code: int | None = None
    timed_out: bool = False
    size_bytes: int = 0


class Receipt(_Record):
    """An episode's one final record: a reward, or a reason why there is none."""

    schema_version: Literal[1] = SCHEMA_VERSION
    episode_id: Id
    attempt: int
    run_id: Id
    group_id: Id | None = None
    task_id: str
    task_digest: str
    template: str
    drive: Drive
    outcome: Outcome
    reward: float | None
    detail: str | None = None
    worker_id: str | None = None
    queued_at: float
    started_at: float | None = None
    finished_at: float
    phases: dict[str, float] = Field(default_factory=dict)
    """Seconds by phase."""
    sizes: dict[str, int] = Field(default_factory=dict)
    """Bytes: artifact, verifier_stdout, observations, setup, verification."""
    operations: tuple[Operation, ...] = ()
    allocations: tuple[Id, ...] = ()

    @model_validator(mode="after")
    def _reward_belongs_to_its_outcome(self) -> Receipt:
        if self.outcome.score is None and self.reward is not None:
            raise ValueError(f"{self.outcome} never carries a reward")
        if self.outcome.score is not None and (self.reward is None or not 0 <= self.reward <= 1):
            raise ValueError(f"{self.outcome} needs a reward within [0, 1]")
        return self


class SettledReceipt(_Record):
    """A receipt as it is shown: with its allocations as they stand now."""

    receipt: Receipt
    allocations: tuple[Allocation, ...]

    @property
    def cost_picousd(self) -> int:
        """What the episode's settled sandboxes cost so far."""
        return sum(row.cost_picousd or 0 for row in self.allocations)

    def as_json(self) -> dict[str, Any]:
        """As every program is given it: the sandboxes as they stand, money as exact decimal digits."""
        body = self.receipt.model_dump(mode="json")
        body["allocations"] = [row.model_dump(mode="json") for row in self.allocations]
        body["cost_usd"] = usd_text(self.cost_picousd)
        return body
