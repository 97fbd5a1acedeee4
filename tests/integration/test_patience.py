"""A trainer's patience: with a Redis that connects and does no work, and with many episodes that wait side by side."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from orchestrator.connection import Patience, client
from orchestrator.keys import Keys
from tests.support.bare_farm import farm_settings
from tests.support.redis_processes import RedisProcess
from tests.support.waiting import wait_until


class Counted(NoBackoff):
    """Waits not at all, and counts how often it would have."""

    waits = 0

    def compute(self, failures: int) -> float:
        self.waits += 1
        return 0.0


def test_a_server_that_was_demoted_is_waited_for_once_although_it_lets_us_connect(tmp_path: Path) -> None:
    with RedisProcess(tmp_path, []) as server, server.client() as admin:
        redis, backoff = client(farm_settings(f"redis://127.0.0.1:{server.port}/0")), Counted()
        Patience(backoff).shared_by(redis)
        redis.set(Keys.COUNTERS, "1")
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        waits = []
        for _ in range(3):
            before = backoff.waits
            with pytest.raises(RedisConnectionError, match="no primary any more"):
                redis.set(Keys.COUNTERS, "2")
            waits.append(backoff.waits - before)
        assert waits[0] > 5
        assert waits[1:] == [0, 0]
        admin.execute_command("REPLICAOF", "NO", "ONE")
        redis.set(Keys.COUNTERS, "3")
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(RedisConnectionError, match="no primary any more"):
            redis.set(Keys.COUNTERS, "4")
        assert backoff.waits == 2 * waits[0], "it had come back: the next outage is waited for again"
        redis.close()


def test_more_than_a_hundred_threads_may_wait_at_once(redis_url: str, redis: Redis) -> None:
    count = 130
    everybody = threading.Barrier(count)

    def wait(number: int) -> object:
        everybody.wait(20)
        return waiting.blpop([Keys.wake(str(number))], timeout=20)

    with client(farm_settings(redis_url)) as waiting, ThreadPoolExecutor(count) as threads:
        answers = [threads.submit(wait, number) for number in range(count)]
        wait_until(lambda: redis.info("clients")["blocked_clients"] == count, description="all of them wait")
        for number in range(count):
            redis.rpush(Keys.wake(str(number)), "now")
        assert [answer.result(20) for answer in answers] == [(Keys.wake(str(number)), "now") for number in range(count)]
