"""The suite's Redis: one real server for the session, emptied before a test and searched for leaks after it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

from redis import Redis

from deploy.embedded import EmbeddedRedis
from orchestrator.finished import START, Finished
from orchestrator.keys import PERSISTENT, Keys
from orchestrator.vocabulary import AllocationState, EpisodeState, episode_of_job


@contextmanager
def running_redis(directory: Path) -> Iterator[str]:
    """The URL of a server that does not wait for the disk."""
    with EmbeddedRedis(directory, appendfsync="no") as server:
        yield server.url


_RQ_REGISTRIES = ("rq:queues", "rq:workers", "rq:workers:*", "rq:finished:*", "rq:failed:*")
"""RQ's lists of what there is and was: names of queues and workers, jobs that ended. RQ itself trims them, in time."""

_RQ_QUEUES = ("rq:queue:*", "rq:queue:*:intermediate", "rq:wip:*")
"""Jobs that wait, that somebody has just popped, and that somebody runs."""


def leaks(client: Redis) -> list[str]:
    """What of the whole database would live for ever without a reason, RQ's keys included, each with what is wrong."""
    names = sorted(name for name in client.scan_iter(count=1000) if client.ttl(name) == -1)
    found = [problem for name in names for problem in _leaks_of(client, name)]
    return found + _money_without_owner(client)


def check_leaks(client: Redis, *, seconds: float = 10) -> None:
    """Fail when something stays; beside living workers, which tell RQ that a job is over just after its receipt."""
    ends = time.monotonic() + seconds
    while (found := leaks(client)) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not found, "\n".join(found)


def _leaks_of(client: Redis, name: str) -> Iterable[str]:
    if _matches(name, PERSISTENT):
        problem = _leak(client, name)
        return [problem] if problem else []
    if _matches(name, _RQ_REGISTRIES):
        return []
    if _matches(name, _RQ_QUEUES):
        entries = client.zrange(name, 0, -1) if name.startswith("rq:wip:") else client.lrange(name, 0, -1)
        jobs = [str(entry).partition(":")[0] for entry in cast("list[str]", entries)]
        return [f"{name} has the job {job}, whose episode is over" for job in jobs if _named(client, job) is False]
    if name.startswith("rq:job:"):
        job = name.removeprefix("rq:job:")
        kept = _named(client, job)
        if kept is None:  # of no episode: somebody has to be able to take it
            kept = any(client.lpos(queue, job) is not None for queue in client.scan_iter(match="rq:queue:*"))
        return [] if kept else [f"{name} has no TTL, and no episode is open that needs it"]
    return [f"{name} has no TTL and is not in keys.PERSISTENT"]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _named(client: Redis, job: str) -> bool | None:
    """Whether the job's episode is open and names this job as its present one; None when there is no such row."""
    row = cast("list[str | None]", client.hmget(Keys.episode(episode_of_job(job)), ["state", "job"]))
    return None if row[0] is None else row[0] != EpisodeState.FINAL and row[1] == job


def _money_without_owner(client: Redis) -> list[str]:
    """What the farm's budget has reserved beyond what episodes that are open or unsettled hold."""
    held = 0
    for name in client.scan_iter(match=Keys.episode("*"), count=1000):
        row = cast("list[str | None]", client.hmget(name, ["reserved_policy", "reserved_verifier"]))
        held += sum(int(amount or 0) for amount in row)
        if any(row) and client.ttl(name) != -1:
            return [f"{name} is over and has money reserved"]
    reserved = int(client.hget(Keys.BUDGET, "reserved") or 0)
    return [] if reserved == held else [f"{Keys.BUDGET} has {reserved} reserved, of which episodes hold {held}"]


def held(client: Redis) -> dict[str, list[str]]:
    """What still holds, waits or is open, by key: nothing of it outlives the last episode."""
    keys = (
        *(Keys.PERMITS, Keys.PLACES, Keys.WAITERS, Keys.WAITERS_SEEN, Keys.CREATORS, Keys.CREATORS_DUE),
        *(Keys.BATCHES, Keys.STEPPED_BACK, Keys.LEASES, Keys.OPEN, Keys.ALLOCATIONS),
    )
    return {key: cast("list[str]", client.zrange(key, 0, -1)) for key in keys}


def _leak(client: Redis, name: str) -> str | None:
    if fnmatchcase(name, Keys.episode("*")) and client.hget(name, "state") == EpisodeState.FINAL:
        settled = client.hget(name, "unsettled") == "0"
        return f"{name} is final and has no TTL" if settled else None
    if fnmatchcase(name, Keys.allocation("*")):
        state = client.hget(name, "state")
        if state is not None and AllocationState(str(state)).settled:
            return f"{name} is settled and has no TTL"
    return None


def dump(client: Redis) -> dict[str, tuple[str, bool, object]]:
    """Every key with its type, whether it expires, and its whole value: two equal dumps are the same database."""
    found: dict[str, tuple[str, bool, object]] = {}
    for name in client.scan_iter(count=1000):
        key, kind = str(name), str(client.type(name))
        found[key] = (kind, client.pttl(key) > 0, _value(client, key, kind))
    return found


def exact(client: Redis) -> dict[str, tuple[object, int]]:
    """The same with the very moment at which each key ends (unix ms, -1 for never): no TTL was touched either."""
    return {name: (value, int(client.pexpiretime(name))) for name, value in dump(client).items()}


def _value(client: Redis, key: str, kind: str) -> object:
    match kind:
        case "string":
            return client.get(key)
        case "hash":
            return client.hgetall(key)
        case "list":
            return client.lrange(key, 0, -1)
        case "set":
            return client.smembers(key)
        case "zset":
            return client.zrange(key, 0, -1, withscores=True)
        case _:
            return client.xrange(key)


def announced(redis: Redis, run_id: str) -> list[str]:
    """Ids of the run's episodes in the order in which they ended, once for each time that it was said."""
    stream, position, found = Finished(redis, run_id), START, list[str]()
    while page := stream.after(position, 0.1):
        position = page[-1][0]
        found += [episode for _, episode in page]
    return found
