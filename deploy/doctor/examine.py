"""Looking at this host: what the judges of judge.py need, gathered without changing anything that stays."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Protocol

import redis

from deploy.doctor import judge
from deploy.doctor.findings import Finding, fail, ok, warn
from deploy.embedded import EmbeddedRedis, redis_binary, running_stack
from orchestrator.connection import client
from orchestrator.errors import AuthenticationFailed, FarmError, RedisUnavailable, SettingsError
from orchestrator.redis_trouble import diagnose
from orchestrator.settings import Settings

_DISTRIBUTION = "rollout-farm"
_SAMPLE = 1000
"""Keys looked at; a foreign application shows in far fewer."""
_PATIENCE_SECONDS = 5.0


class Lister(Protocol):
    """What the doctor needs of a provider: one call that needs the key and changes nothing."""

    def list(self, metadata: Mapping[str, str]) -> object:
        """Sandboxes that carry all of `metadata`."""


def examine(
    settings: Settings,
    *,
    provider: Callable[[Settings], Lister],
    check_jail: Callable[[], str | None],
) -> list[Finding]:
    """Every finding, worst or not, in a fixed order; `provider` makes the one that settings name."""
    local = settings.e2b_api_key is None
    limit = settings.limits()[0]
    return [
        judge.judge_python(sys.version_info[:3]),
        *_packages(),
        *_redis(settings),
        _provider(settings, provider),
        _jails(check_jail, needed=local),
        judge.judge_capacity(_cores(), _free_memory_bytes(), limit=limit, local=local),
    ]


def examine_redis(settings: Settings) -> list[Finding]:
    """A Redis that should be there."""
    try:
        with client(settings, patient=False, answer_seconds=_PATIENCE_SECONDS) as connection:
            return [
                *judge.judge_redis(connection.info(), _config(connection), _foreign(connection)),
                judge.judge_delay(min(_ping_seconds(connection) for _ in range(5))),
            ]
    except RedisUnavailable as error:
        wrong, _, mend = str(error).rpartition("; ")
        return [fail("Redis", wrong, mend)]
    except (redis.RedisError, OSError) as error:
        trouble = diagnose(error, settings.redis_url or "")
        return [fail("Redis", trouble.wrong, trouble.mend)]


def _redis(settings: Settings) -> list[Finding]:
    if settings.redis_url is not None:
        return examine_redis(settings)
    running = running_stack(settings)
    if running is not None and running.redis_url is not None:
        return [ok("Stack", f"running in {settings.state_dir}"), *examine_redis(running)]
    try:
        binary = redis_binary()
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="farm-doctor-") as directory:
            with EmbeddedRedis(Path(directory), binary=binary) as server:
                milliseconds = (time.monotonic() - started) * 1000
                found = examine_redis(settings.model_copy(update={"redis_url": server.url}))
        return [ok("Embedded Redis", f"{binary} starts in {milliseconds:.0f} ms"), *found]
    except FarmError as error:
        text, _, mend = str(error).rpartition("; ")
        return [fail("Embedded Redis", text or str(error), mend or "set REDIS_URL")]


def _provider(settings: Settings, provider: Callable[[Settings], Lister]) -> Finding:
    key, url = settings.e2b_api_key, settings.e2b_api_url
    if key is None and url is None:
        return ok("Provider", "the local sandbox service; E2B's cloud not contacted, since E2B_API_KEY is not set")
    if key is None:
        return fail("Provider", f"{url} needs a key", "set E2B_API_KEY, or unset FARM_E2B_API_URL")
    name = url or "E2B cloud"
    try:
        provider(settings).list({"farm": "doctor"})
    except SettingsError as error:
        return fail("Provider", str(error), "correct it, then try again")
    except AuthenticationFailed:
        return fail("Provider", f"{name} does not accept the key", "correct E2B_API_KEY (e2b.dev/dashboard)")
    except FarmError as error:
        return fail("Provider", f"{name}: {error}", "check the network and FARM_E2B_API_URL, then try again")
    return ok("Provider", f"{name} accepts the key")


def _jails(check_jail: Callable[[], str | None], *, needed: bool) -> Finding:
    if not needed:
        return ok("Jails", "not needed: sandboxes run at the provider")
    if sys.platform != "linux":
        return fail("Jails", f"this is {sys.platform}", "set E2B_API_KEY: local sandboxes need Linux")
    if problem := check_jail():
        return fail("Jails", problem, "mend it as said, or set E2B_API_KEY to run sandboxes on the E2B cloud")
    return ok("Jails", "bubblewrap can make one")


def _packages() -> list[Finding]:
    try:
        requirements = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return [warn("Packages", f"{_DISTRIBUTION} is not installed", "pip install -c deploy/constraints.txt -e .")]
    return judge.judge_versions(requirements, _Installed())


class _Installed(Mapping[str, str]):
    """Installed distributions by name, looked up one at a time: reading all of them takes a second."""

    def __getitem__(self, name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (distribution.name for distribution in metadata.distributions())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _config(client: redis.Redis) -> Mapping[str, str] | None:
    try:
        return {
            str(name): str(value)
            for pattern in ("append*", "maxmemory-policy")
            for name, value in client.config_get(pattern).items()
        }
    except redis.ResponseError:
        return None


def _foreign(client: redis.Redis) -> list[str]:
    """Keys of others; the SCAN that tells needs a right that the farm's own user has."""
    return [key for key in islice(client.scan_iter(count=_SAMPLE), _SAMPLE) if judge.is_foreign(key)]


def _ping_seconds(client: redis.Redis) -> float:
    started = time.perf_counter()
    client.ping()
    return time.perf_counter() - started


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_memory_bytes() -> int:
    """What new processes may take: the host's available memory, or less when a control group says so."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # ValueError: "max"
        return free
