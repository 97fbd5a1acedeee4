"""The faults that the service injects on request, as data: what may go wrong, how often, for how long.

    Often      3 (the next three), "25%" (each with this probability), "always"
    Latency    "constant:0.2", "uniform:0.1:0.5", "exponential:0.2", "lognormal:0.2:0.6"

All of it can be written as text, so that a command line and a JSON file say the same. By default nothing is wrong.
"""

from __future__ import annotations

import math
from enum import StrEnum
from random import Random
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_serializer, model_validator

LONGEST_SECONDS = 3_600.0
_LONGEST_DELAY_SECONDS = 60.0
"""Of a latency, whatever its distribution draws: a tail must not keep requests for ever."""

Seconds = Annotated[float, Field(ge=0, le=LONGEST_SECONDS, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

_OFTEN = 'a count such as 3, a share such as "25%", "always" or "never"'
_LATENCY = '"constant:SECONDS", "uniform:FROM:TO", "exponential:MEAN" or "lognormal:MEDIAN:SIGMA"'


class Operation(StrEnum):
    """What a request wants; administration is none of these and is never disturbed, but by an outage."""

    CREATE = "create"
    LIST = "list"
    INFO = "info"
    CONNECT = "connect"
    DELETE = "delete"
    CHANGE = "change"  # timeouts, pauses and what else alters a sandbox
    PROBE = "probe"  # the agent's sign of life
    FILES = "files"  # what is asked of them and written to them
    DOWNLOAD = "download"  # what they hold
    COMMAND = "command"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Often(_Frozen):
    """How often something goes wrong: the next `count` times, and after that with this `probability`."""

    count: Annotated[int, Field(ge=0)] = 0
    probability: Probability = 0.0

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, dict | Often):
            return value
        text = str(value).strip().lower()
        if text in ("always", "true"):
            return {"probability": 1.0}
        if text in ("never", "false"):
            return {}
        if text.isascii() and text.isdigit():
            return {"count": int(text)}
        if text.endswith("%"):
            try:
                return {"probability": float(text[:-1]) / 100}
            except ValueError:
                pass
        raise ValueError(f"expected {_OFTEN}")

    @model_serializer
    def _as_text(self) -> Any:
        if self.count and self.probability:
            return {"count": self.count, "probability": self.probability}
        if self.probability == 1:
            return "always"
        return f"{self.probability * 100:g}%" if self.probability else self.count


class Latency(_Frozen):
    """How long an operation is held up before it is handled."""

    distribution: Literal["constant", "uniform", "exponential", "lognormal"]
    seconds: Seconds
    """constant: each; uniform: the shortest; exponential: the mean; lognormal: the median."""
    spread: Annotated[float, Field(ge=0, le=LONGEST_SECONDS, allow_inf_nan=False)] = 0.0
    """uniform: the longest, in seconds; lognormal: sigma, without unit; otherwise nothing."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, dict | Latency):
            return value
        distribution, *numbers = str(value).strip().split(":")
        wanted = 2 if distribution in ("uniform", "lognormal") else 1
        if len(numbers) != wanted:
            raise ValueError(f"expected {_LATENCY}")
        return dict(zip(("distribution", "seconds", "spread"), (distribution, *numbers), strict=False))

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Latency:
        if self.distribution == "uniform" and self.spread < self.seconds:
            raise ValueError("uniform:FROM:TO needs FROM <= TO")
        return self

    @model_serializer
    def _as_text(self) -> str:
        two = self.distribution in ("uniform", "lognormal")
        return f"{self.distribution}:{self.seconds:g}" + (f":{self.spread:g}" if two else "")

    def draw(self, random: Random) -> float:
        """One delay in seconds."""
        match self.distribution:
            case "constant":
                drawn = self.seconds
            case "uniform":
                drawn = random.uniform(self.seconds, self.spread)
            case "exponential":
                drawn = random.expovariate(1 / self.seconds) if self.seconds else 0.0
            case "lognormal":
                drawn = random.lognormvariate(math.log(self.seconds), self.spread) if self.seconds else 0.0
        return min(drawn, _LONGEST_DELAY_SECONDS)


PerOperation = dict[Operation, Often]


class Faults(_Frozen):
    """Everything that can be made to go wrong; what is not named works.

    `only` narrows all of them but `create_rate`, `max_sandboxes`, `html_429`, `list_unfiltered` and `outage_seconds`.
    """

    seed: int = 0
    """Of probabilities and latencies: the same calls in the same order meet the same faults."""
    only: dict[str, str] = Field(default_factory=dict)
    """Sandboxes whose metadata holds all of this, and creations of such; a request for no sandbox is never left out."""

    create_rate: Annotated[float, Field(ge=0, le=100_000, allow_inf_nan=False)] = 0.0
    """Creations a second that are accepted; more are answered 429 of the rate kind. 0: any number."""
    create_burst: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Creations that are accepted at once after a pause."""
    rate_limited: Often = Often()
    """Creations answered 429 of the rate kind whatever their rate."""
    retry_after: bool = True
    """Whether a 429 of the rate kind says when to come back: Retry-After, whole seconds, at least 1."""
    html_429: bool = False
    """Every 429 at a creation has an HTML body, as from a proxy in front."""

    max_sandboxes: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Sandboxes that may exist; a creation above is answered 429 of the concurrency kind. 0: the service's own cap."""
    count_lag_seconds: Seconds = 0.0
    """A sandbox that ended still counts for so long."""

    latency: dict[Operation, Latency] = Field(default_factory=dict)
    """A delay before an operation is handled; a client that leaves meanwhile does not stop it."""
    unavailable: PerOperation = Field(default_factory=dict)
    """Answered 503, and not carried out."""
    page: PerOperation = Field(default_factory=dict)
    """Answered `page_status` with an HTML page, as by a proxy in front, and not carried out."""
    page_status: Annotated[int, Field(ge=200, le=599)] = 504
    bad_gateway: PerOperation = Field(default_factory=dict)
    """Carried out, and answered 502, as by a gateway that lost its upstream."""
    lost: PerOperation = Field(default_factory=dict)
    """Carried out, and the connection cut instead of an answer."""
    hung: PerOperation = Field(default_factory=dict)
    """Neither carried out nor answered: held until the client leaves."""
    stream_cut: Often = Often()
    """Command streams cut after their first event; the command itself goes on."""
    stream_stalled: Often = Often()
    """Command streams on which nothing comes after the first event; the command itself goes on."""

    dies_after_seconds: Seconds = 0.0
    """A sandbox that starts from now on crashes so long after it has started. 0: never."""
    dies_after_commands: Annotated[int, Field(ge=0)] = 0
    """A sandbox crashes when so many commands have been run in it from now on. 0: never."""
    undeletable_seconds: Seconds = 0.0
    """Deletions of a sandbox fail with 500 for so long after the first one was tried."""
    delete_lag_seconds: Seconds = 0.0
    """A deletion is answered 204 at once, and the sandbox goes on for so long."""

    list_unfiltered: bool = False
    """The list ignores its metadata filter."""

    outage_seconds: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] = 0.0
    """From the moment this is set nothing listens for so long: connections are refused. Set again, it happens again."""

    @field_validator("only")
    @classmethod
    def _few(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > 20:
            raise ValueError("at most 20 metadata pairs")
        return value

    def shown(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON that can be set again."""
        return self.model_dump(mode="json", exclude_defaults=True)


def explain(problem: Any) -> str:
    """One validation problem of `Faults`, naming the fault and what it takes."""
    name = ".".join(str(part) for part in problem["loc"] if part != "[key]") or "faults"
    if problem["type"] == "extra_forbidden":
        known = ", ".join(Faults.model_fields)
        return f"{name}: there is no such fault; there are {known}"
    if problem["type"] == "dict_type":
        whose, member = ("metadata", "role") if name == "only" else ("operation", "create")
        return f"{name}: say of which {whose}, such as {name}.{member}={problem['input']}"
    return f"{name}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r})"
