"""A server that is demoted in place, behind one address: an outage that passes, whatever was asked meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from orchestrator.connection import client
from orchestrator.keys import Keys
from orchestrator.mailbox import Mailbox
from tests.support.bare_farm import farm_settings
from tests.support.redis_processes import RedisProcess
from tests.support.waiting import wait_until

EPISODE = "e-1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path) as server:
        yield server


@pytest.fixture
def admin(server: RedisProcess) -> Iterator[Redis]:
    with server.client() as admin:
        yield admin


@pytest.fixture
def redis(server: RedisProcess) -> Iterator[Redis]:
    with client(farm_settings(f"redis://127.0.0.1:{server.port}/0")) as redis:
        redis.hset(Keys.episode(EPISODE), mapping={"token": "1", "state": "running"})
        yield redis


def take(redis: Redis) -> object:
    return Mailbox(redis, EPISODE).take(1, "1", 3)


def wait_for_permit(redis: Redis) -> object:
    return redis.blpop([Keys.wake(EPISODE)], timeout=3)


def write(redis: Redis) -> object:
    return redis.hset(Keys.COUNTERS, "x", 1)


@pytest.mark.parametrize("call", [take, wait_for_permit])
def test_who_is_blocked_while_the_server_is_demoted_waits_on(
    redis: Redis, admin: Redis, call: Callable[[Redis], object]
) -> None:
    def demote() -> None:
        wait_until(lambda: admin.info("clients")["blocked_clients"], description="it is blocked")
        admin.replicaof("127.0.0.1", "1")
        rejected = "errorstat_READONLY"
        wait_until(lambda: rejected in admin.info("errorstats"), description="it has asked the replica")
        admin.replicaof("NO", "ONE")

    thread = threading.Thread(target=demote)
    thread.start()
    assert call(redis) is None
    thread.join()


@pytest.mark.parametrize(("call", "answer"), [(take, None), (wait_for_permit, None), (write, 1)])
def test_what_is_asked_of_a_replica_is_asked_again_when_it_is_the_primary(
    redis: Redis, admin: Redis, call: Callable[[Redis], object], answer: object
) -> None:
    def promote() -> None:
        wait_until(lambda: "errorstat_READONLY" in admin.info("errorstats"), description="it has been refused")
        admin.replicaof("NO", "ONE")

    redis.ping()
    admin.replicaof("127.0.0.1", "1")
    thread = threading.Thread(target=promote)
    thread.start()
    assert call(redis) == answer
    thread.join()
