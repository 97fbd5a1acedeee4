"""What the ledger hands out: an episode's row, a slot's lease of it, its progress. Values only: none of them writes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pydantic import ValidationError

from orchestrator.errors import FarmError
from orchestrator.records import EpisodeSpec
from orchestrator.vocabulary import EpisodeState, Outcome

_TICK_SECONDS = 0.001
"""Redis's times are whole milliseconds, cut off."""


@dataclass(frozen=True)
class Lease:
    """A slot's ownership of one attempt of an episode; times are unix seconds of Redis."""

    episode_id: str
    attempt: int
    token: str
    queued_at: float
    taken_at: float
    farm_tag: str
    cancelled: bool
    """Whether somebody has asked for its end already."""
    asked: float = field(compare=False)
    """This process's monotonic clock just before it was taken."""

    def now(self) -> float:
        """Redis's time by this process's clock, never earlier than what Redis has noted: a round trip late at most."""
        return self.taken_at + _TICK_SECONDS + time.monotonic() - self.asked


@dataclass(frozen=True)
class EpisodeRow:
    """An episode's row as it stands."""

    episode_id: str
    state: EpisodeState
    attempt: int
    job_id: str
    run_id: str
    group_id: str
    """'' for none."""
    trainer_id: str
    """Who drives it, '' when it runs by itself."""
    queue: str
    """Name of the queue that its job belongs on, '' when the row does not say."""
    spec_text: str
    """The spec as it was submitted, perhaps by another version of this package."""
    queued_at: float
    started_at: float | None
    unsettled: int
    outcome: Outcome | None
    lost_jobs: int = 0
    """How often its job was lost and enqueued again."""

    @property
    def task_id(self) -> str:
        """The task's id, 'unknown' when this version cannot read the spec."""
        try:
            return self.spec.task.id
        except FarmError:
            return "unknown"

    @property
    def spec(self) -> EpisodeSpec:
        """The spec; raises FarmError when this version cannot read it."""
        try:
            return EpisodeSpec.model_validate_json(self.spec_text)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "it"
            raise FarmError(
                f"{self.episode_id}: its row cannot be read by this version ({where}: {problem['msg']}); "
                "run one version of the farm everywhere, then submit it again"
            ) from None


@dataclass(frozen=True)
class OpenEpisode:
    """As much of an open row as looking over all of them needs."""

    episode_id: str
    state: EpisodeState
    job_id: str
    run_id: str = ""
    group_id: str = ""
    trainer_id: str = ""
    """Who drives it, '' when it runs by itself."""
    cancelled: bool = False
    """Whether somebody asked for its end."""
    queue: str = ""
    """Name of the queue that its job belongs on, '' when the row does not say."""
    lost_jobs: int = 0
    """How often its job was lost and enqueued again."""
    batch: str = ""
    """The reservation that it was submitted with, '' for none."""
    together_seconds: float = 0.0
    """How long it may be queued while others of that run."""


@dataclass(frozen=True)
class Progress:
    """How far an episode is from being over."""

    outcome: Outcome | None
    """None while it is open."""
    unsettled: tuple[str, ...]
    """Its allocations, while not all of them are settled."""
