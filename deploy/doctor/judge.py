"""From what was seen to findings: pure, so that every row can be tested without the host that has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packaging.requirements import Requirement

from deploy.doctor.findings import Finding, fail, ok, warn
from orchestrator.keys import FARM
from orchestrator.vocabulary import SLOTS_PER_WORKER

_PYTHON = ((3, 11), (3, 14))
_REDIS = (6, 2)
"""The oldest that knows every command and option the farm and RQ use."""
_SLOW_REDIS_SECONDS = 0.02
"""A tool call crosses Redis twice."""
_WORKER_BYTES = 120 * 2**20
"""One idle worker: a Terminus server and two slots."""
_LOCAL_SANDBOX_BYTES = 160 * 2**20
"""A local sandbox that runs a small Python program, with room; its own limit is higher."""
_WORKERS_PER_CORE = 4
"""Episodes mostly wait for a policy or a provider."""
_DURABLE = {
    "appendonly": ("yes", "a restart loses episodes and receipts"),
    "appendfsync": ("always", "a crash of the host can lose receipts that were answered"),
    "maxmemory-policy": ("noeviction", "it may evict rows and receipts when memory is short"),
}


def judge_python(version: tuple[int, ...]) -> Finding:
    """The interpreter's version."""
    shown = ".".join(map(str, version[:3]))
    low, high = _PYTHON
    if low <= version[:2] < high:
        return ok("Python", shown)
    return fail("Python", shown, "install Python 3.11, 3.12 or 3.13 and make the virtual environment anew")


def judge_redis(info: Mapping[str, Any], config: Mapping[str, str] | None, foreign: Iterable[str]) -> list[Finding]:
    """A reachable Redis, from INFO, CONFIG GET (None when refused) and a sample of keys that are not ours."""
    return [_redis_server(info), *_redis_config(config), _redis_keys(sorted(foreign))]


def judge_delay(seconds: float) -> Finding:
    """How long Redis takes to answer PING, at best."""
    shown = f"answers in {seconds * 1000:.2f} ms"
    if seconds <= _SLOW_REDIS_SECONDS:
        return ok("Redis delay", shown)
    return warn("Redis delay", shown, "put workers and Redis into one network: every tool call crosses it twice")


def judge_capacity(cores: int, memory_bytes: int, *, limit: int, local: bool) -> Finding:
    """How many workers this host can carry."""
    each = _WORKER_BYTES + (SLOTS_PER_WORKER * _LOCAL_SANDBOX_BYTES if local else 0)
    fits = min(cores * _WORKERS_PER_CORE, memory_bytes // each)
    seen = f"{cores} core{'' if cores == 1 else 's'}, {memory_bytes / 2**30:.1f} GiB free"
    if fits < 1:
        need = each / 2**30
        return fail("Capacity", seen, f"free at least {need:.1f} GiB of memory for one worker")
    useful = max(1, min(fits, limit // SLOTS_PER_WORKER))
    detail = f"{seen}: up to {useful} worker{'' if useful == 1 else 's'} ({useful * SLOTS_PER_WORKER} slots)"
    if useful < fits:
        return ok("Capacity", f"{detail}, by FARM_CONCURRENCY_LIMIT={limit}; the host would carry {fits}")
    return ok("Capacity", detail)


def judge_versions(requirements: Iterable[str], installed: Mapping[str, str]) -> list[Finding]:
    """The packages the distribution asks for, against what is there; extras and other platforms apart."""
    wrong = []
    count = 0
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        found = installed.get(requirement.name)
        if found is None:
            wrong.append(fail("Packages", f"{requirement.name} is not installed", _REINSTALL))
        elif not requirement.specifier.contains(found, prereleases=True):
            detail = f"{requirement.name} {found} is outside {requirement.specifier}"
            wrong.append(warn("Packages", detail, _REINSTALL))
    return wrong or [ok("Packages", f"{count} packages, each within its range")]


_REINSTALL = "install again with the pins: pip install -c deploy/constraints.txt -e ."


def _redis_server(info: Mapping[str, Any]) -> Finding:
    version = str(info.get("redis_version", "0"))
    name = str(info.get("server_name") or "Redis")
    shown = f"{name} {version}"
    if name == "valkey":
        shown = f"Valkey {info.get('valkey_version', '')} (as Redis {version})"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < _REDIS:
        return fail("Redis", shown, "use Redis 6.2 or newer, or Valkey")
    if info.get("role", "master") != "master":
        return fail("Redis", f"{shown}, a replica", "point REDIS_URL at the primary: a replica takes no writes")
    if str(info.get("cluster_enabled", 0)) == "1":
        return fail("Redis", f"{shown}, a cluster", "use a single server: the farm's scripts span keys")
    return ok("Redis", shown)


def _redis_config(config: Mapping[str, str] | None) -> list[Finding]:
    if not config:
        return [
            warn(
                "Redis durability",
                "this Redis does not show its configuration",
                "ask its operator for appendonly yes, appendfsync always, maxmemory-policy noeviction",
            )
        ]
    off = [
        warn("Redis durability", f"{name} is {config.get(name, 'unknown')}: {why}", f"CONFIG SET {name} {wanted}")
        for name, (wanted, why) in _DURABLE.items()
        if config.get(name) != wanted
    ]
    return off or [ok("Redis durability", "appendonly yes, appendfsync always, noeviction")]


def _redis_keys(foreign: list[str]) -> Finding:
    if not foreign:
        return ok("Redis keys", "empty, or the farm's and RQ's only")
    return warn(
        "Redis keys",
        f"keys of something else, such as {foreign[0]!r}",
        "give the farm a database of its own, for example REDIS_URL=redis://host:6379/1",
    )


def is_foreign(key: str) -> bool:
    """Whether a key belongs neither to the farm nor to RQ."""
    return not key.startswith((FARM, "rq:"))
