"""Every setting of the farm, read once by the composition root and handed on as frozen values.

Variables carry the prefix FARM_ (REDIS_URL and E2B_API_KEY keep their usual names); a `.env` file in the working
directory is read too, real variables win. A wrong value is one SettingsError that names the variable. An
empty variable unsets a setting that may be unset, whatever `.env` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    FilePath,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableSettings

from orchestrator.cost import HIGHEST_USD_PER_SECOND, LIST_PRICES, Rates, Size
from orchestrator.errors import SettingsError
from orchestrator.vocabulary import Role

HIGHEST_CONCURRENCY = 100_000
HIGHEST_RATE = 10_000
"""Bounds of both limits, far beyond any plan: a larger number is a slip."""

LOWEST_RATE = 0.001
"""Creations a second; a slower rate, one in more than a quarter of an hour, stops the farm and is a slip too."""

DEFAULT_QUEUE = "episodes"

_BUDGET = "FARM_BUDGETS__"

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]


def _not_endless(rate: float) -> float:
    if 0 < rate < LOWEST_RATE:
        raise ValueError(f"must be 0 (no limit of ours) or at least {LOWEST_RATE} a second")
    return rate


CreationRate = Annotated[float, Field(ge=0, le=HIGHEST_RATE, allow_inf_nan=False), AfterValidator(_not_endless)]
UsdPerSecond = Annotated[float, Field(ge=0, le=HIGHEST_USD_PER_SECOND, allow_inf_nan=False)]


def _sendable(secret: SecretStr) -> SecretStr:
    text = secret.get_secret_value().strip()  # the line end of a file is no part of it
    if not all("!" <= character <= "~" for character in text):
        raise ValueError("holds what no HTTP header can carry: it has to be visible ASCII without spaces")
    return SecretStr(text)


Secret = Annotated[SecretStr, AfterValidator(_sendable)]
"""A key or token as HTTP can send it: what cannot be sent is quoted by the libraries' errors."""

ANSWER_SECONDS = 5.0
"""What a command's answer may take beyond the command's own limit."""
_VERIFIER_ANSWER_SECONDS = 10.0
"""What the answer of the verifier's command may take beyond the command."""

_TURNAROUND_SECONDS = 2.0
"""What a slot may take from one episode to the next, on a busy host."""

REDIS_TLS_FILES = ("redis_ca_file", "redis_certificate_file", "redis_key_file")


class Budgets(BaseModel):
    """Time and size limits of one episode; seconds and bytes. The defaults are the design's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    admission_seconds: Seconds = 900
    reserved_admission_seconds: Seconds = 120
    deadline_seconds: Seconds = 600
    policy_window_seconds: Seconds = 120
    first_lifetime_seconds: Annotated[int, Field(ge=10, le=3_600)] = 300
    policy_lifetime_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    verifier_lifetime_seconds: Annotated[int, Field(ge=10, le=3_600)] = 120
    command_seconds: Seconds = 10
    message_seconds: Seconds = 25
    verifier_command_seconds: Seconds = 20
    transfer_seconds: Seconds = 10
    create_request_seconds: Seconds = 5
    transfer_bytes: Annotated[int, Field(ge=1, le=16 * 1024 * 1024)] = 64 * 1024
    observation_bytes: Annotated[int, Field(ge=1, le=16 * 1024 * 1024)] = 64 * 1024
    command_bytes: Annotated[int, Field(ge=1, le=96 * 1024)] = 96 * 1024
    cleanup_seconds: Seconds = 60

    @property
    def verifier_limit_seconds(self) -> float:
        """When the verifier's command is killed: before its answer is due, no sooner than any other command."""
        return max(self.command_seconds, self.verifier_command_seconds - _VERIFIER_ANSWER_SECONDS)

    @property
    def together_seconds(self) -> float:
        """How long one of a reserved batch may be queued while others of it run: far less than their policy windows."""
        return min(self.reserved_admission_seconds, max(_TURNAROUND_SECONDS, self.policy_window_seconds / 4))

    def longest_seconds(self, role: Role) -> int:
        """The longest that such a sandbox can live, and cost, with nobody there to delete it.

        A policy sandbox is extended to end policy_lifetime_seconds after its creation was sent; two request times are
        more than that call takes, and a second is lost to rounding.
        """
        if role is Role.VERIFIER:
            return self.verifier_lifetime_seconds
        extended = self.policy_lifetime_seconds + math.ceil(2 * self.create_request_seconds) + 1
        return max(self.first_lifetime_seconds, extended)


class Settings(BaseSettings):
    """The farm's settings. Pass keyword arguments in tests; call `load_settings` in the composition root."""

    model_config = SettingsConfigDict(
        env_prefix="FARM_", env_file=".env", env_nested_delimiter="__", extra="ignore", frozen=True
    )

    redis_url: str | None = Field(
        default=None, repr=False, validation_alias=AliasChoices("redis_url", "REDIS_URL", "FARM_REDIS_URL")
    )
    """Its forms: redis_address.py. It may hold a password."""
    redis_ca_file: FilePath | None = None
    """PEM file of the authority that signed the certificates of Redis and its Sentinels, where the system's do not."""
    redis_certificate_file: FilePath | None = None
    redis_key_file: FilePath | None = None
    """PEM files of our own certificate and its key, where Redis asks for one; the first may hold both."""
    e2b_api_key: Secret | None = Field(
        default=None, validation_alias=AliasChoices("e2b_api_key", "E2B_API_KEY", "FARM_E2B_API_KEY")
    )
    e2b_api_url: str | None = None
    """Base URL of another E2B-compatible service; the cloud when unset."""
    template: Annotated[str, Field(min_length=1, max_length=100)] = "base"
    queue: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")] = DEFAULT_QUEUE
    """Where jobs go; workers take from it alone. Farms on one database may have several: one reconciler sees all."""

    concurrency_limit: Annotated[int, Field(ge=1, le=HIGHEST_CONCURRENCY)] = 20
    """Running sandboxes, project-wide."""
    creation_rate: CreationRate = 0
    """Creations a second, project-wide; 0 means no limit of ours."""
    plan: Literal["hobby", "pro"] | None = None
    """Preset of concurrency_limit and creation_rate for the E2B cloud; explicit values win."""

    budgets: Budgets = Budgets()
    lease_renew_seconds: Seconds = 3
    lease_lost_seconds: Seconds = 12
    trainer_beat_seconds: Seconds = 5
    trainer_lost_seconds: Seconds = 30
    drain_seconds: Seconds = 120
    """How long a stopping worker lets running episodes finish before it closes them."""
    terminus_hung_seconds: Seconds = 30
    """A worker's Terminus server that answers nothing for so long is killed, and started again."""
    reconcile_seconds: Seconds = 2
    receipt_retention_seconds: Annotated[int, Field(ge=60, le=3_660 * 86_400)] = 30 * 86_400
    transcript_bytes: Annotated[int, Field(ge=0)] = 1024 * 1024
    """Cap of one episode's transcript; 0 switches transcripts off."""

    vcpu_usd_per_second: UsdPerSecond = LIST_PRICES.vcpu_usd_per_second
    gib_usd_per_second: UsdPerSecond = LIST_PRICES.gib_usd_per_second
    default_vcpus: Annotated[int, Field(ge=1, le=128)] = LIST_PRICES.assumed.vcpus
    default_memory_mb: Annotated[int, Field(ge=1, le=1024 * 1024)] = LIST_PRICES.assumed.memory_mb
    """Size of a sandbox, in vCPUs and MiB, until its template's real size is known: what a budget reserves for."""

    terminus_token: Secret | None = None
    """Bearer token of a Terminus server that runs alone; required when it listens beyond loopback."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Where the orchestrator serves dashboard, /metrics, /healthz and /readyz; 0 takes a free port, unset none."""
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    metrics_token: Secret | None = None
    """Bearer token of /metrics, password of the dashboard; required when they are served beyond loopback."""
    state_dir: Path = Path(".farm")
    """Where the embedded stack keeps its Redis data, sockets and sandbox directories."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object, info: ValidationInfo) -> object:
        may_be_unset = info.field_name is not None and cls.model_fields[info.field_name].default is None
        return None if may_be_unset and isinstance(value, str) and not value.strip() else value

    @model_validator(mode="after")
    def _beats_fit_their_limits(self) -> Settings:
        if self.lease_lost_seconds < 2 * self.lease_renew_seconds:
            raise ValueError("FARM_LEASE_LOST_SECONDS must be at least twice FARM_LEASE_RENEW_SECONDS")
        if self.trainer_lost_seconds < 2 * self.trainer_beat_seconds:
            raise ValueError("FARM_TRAINER_LOST_SECONDS must be at least twice FARM_TRAINER_BEAT_SECONDS")
        return self

    @model_validator(mode="after")
    def _tls_files_fit_the_redis_url(self) -> Settings:
        given = [f"FARM_{name.upper()}" for name in REDIS_TLS_FILES if getattr(self, name) is not None]
        if given and self.redis_url is not None and not self.redis_url.startswith("rediss"):
            raise ValueError(
                f"{given[0]} is set, but REDIS_URL has no TLS: begin it with rediss:// or rediss+sentinel://"
            )
        if self.redis_key_file is not None and self.redis_certificate_file is None:
            raise ValueError("FARM_REDIS_KEY_FILE is set without FARM_REDIS_CERTIFICATE_FILE: set that too")
        return self

    def rates(self) -> Rates:
        """What sandboxes cost."""
        size = Size(self.default_vcpus, self.default_memory_mb)
        return Rates(self.vcpu_usd_per_second, self.gib_usd_per_second, size)

    def limits(self) -> tuple[int, float]:
        """Configured (concurrency, creation rate): the plan's preset where no explicit value was given."""
        preset = PLANS[self.plan] if self.plan else (self.concurrency_limit, self.creation_rate)
        given = self.model_fields_set
        return (
            self.concurrency_limit if "concurrency_limit" in given else preset[0],
            self.creation_rate if "creation_rate" in given else preset[1],
        )


PLANS = {"hobby": (20, 1.0), "pro": (100, 5.0)}
"""E2B's public plan limits: concurrent sandboxes, creations a second."""


def load_settings(**overrides: Any) -> Settings:
    """Read the environment and `.env`; raise one SettingsError that names each wrong variable."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(problem) for problem in error.errors())) from None
    except UnreadableSettings as error:  # a nested setting that is no JSON object
        raise SettingsError(f"{error}: set its parts instead, such as FARM_BUDGETS__COMMAND_SECONDS=10") from None
    except UnicodeDecodeError as error:
        where = f"{Path('.env').absolute()}: is not UTF-8 (byte {error.start})"
        raise SettingsError(f"{where}; save it as UTF-8, or remove it") from None
    except PermissionError as error:
        raise SettingsError(f"{Path('.env').absolute()}: cannot be read: {error.strerror}; see to its rights") from None


def as_variables(settings: Settings) -> dict[str, str]:
    """The environment by which another process has these very settings: all of them, whatever its `.env` says.

    What is unset is "". A plan is given as the limits that it presets.
    """
    concurrency, rate = settings.limits()
    preset = {"plan": None, "concurrency_limit": concurrency, "creation_rate": rate}
    values = {name: getattr(settings, name) for name in Settings.model_fields if name != "budgets"} | preset
    budgets = {f"budgets__{name}": getattr(settings.budgets, name) for name in Budgets.model_fields}
    return {_variable(name): _text(value) for name, value in {**values, **budgets}.items()}


def _text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return "" if value is None else str(value)


def _variable(name: str) -> str:
    """The variable of a setting, or of a part of one such as budgets__command_seconds."""
    return name.upper() if name.upper() in ("REDIS_URL", "E2B_API_KEY") else f"FARM_{name.upper()}"


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Which of these environment variables look like settings of ours and are none, each with the nearest one."""
    known = {f"FARM_{name.upper()}" for name in Settings.model_fields} | {"FARM_REDIS_URL", "FARM_E2B_API_KEY"}
    known |= {f"{_BUDGET}{name.upper()}" for name in Budgets.model_fields}
    found = []
    for name in sorted(names):
        if name.upper().startswith("FARM_") and name.upper() not in known:
            if name.upper().startswith(_BUDGET):
                hint = _near_budget(name.upper().removeprefix(_BUDGET))
            else:
                near = get_close_matches(name.upper(), known, n=1, cutoff=0.8)
                hint = f"did you mean {near[0]}?" if near else ""
            found.append(f"{name} is no setting of the farm" + (f"; {hint}" if hint else ""))
    return found


def _near_budget(part: str) -> str:
    names = [name.upper() for name in Budgets.model_fields]
    near = get_close_matches(part.upper(), names, n=1)
    return f"did you mean {_BUDGET}{near[0]}?" if near else f"after {_BUDGET} goes one of {', '.join(names)}"


_SECRETS = frozenset({"E2B_API_KEY", "FARM_METRICS_TOKEN", "FARM_TERMINUS_TOKEN"})


def _explain(problem: Any) -> str:
    if not problem["loc"]:  # of settings that do not fit each other; the text names them
        return f"{problem['msg'].removeprefix('Value error, ')}; correct it in the environment or in .env"
    name = "__".join(str(part) for part in problem["loc"])
    variable = _variable(name)
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        text = f"no such budget; {_near_budget(variable.removeprefix(_BUDGET))}"
    got = "" if variable in _SECRETS else f" (got {problem['input']!r})"
    return f"{variable}: {text}{got}; correct it in the environment or in .env"
