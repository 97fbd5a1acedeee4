"""The embedded Redis: durable, private, alone in its directory, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer

from deploy.embedded import EmbeddedRedis, redis_binary
from orchestrator.errors import RedisUnavailable
from tests.support.processes import exists
from tests.support.waiting import wait_until


def client(server: EmbeddedRedis) -> Redis:
    return Redis.from_url(server.url, decode_responses=True)


def test_it_is_set_up_to_lose_nothing(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server, client(server) as redis:
        assert redis.config_get("appendonly") == {"appendonly": "yes"}
        assert redis.config_get("appendfsync") == {"appendfsync": "always"}
        assert redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert redis.config_get("port") == {"port": "0"}


def test_nobody_else_may_enter_its_directory(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        assert server.directory.stat().st_mode & 0o077 == 0


def test_what_was_answered_survives_a_crash_under_the_same_url(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        url = server.url
        with client(server) as redis:
            redis.set("kept", "yes", ex=3600)
        server.kill()
        assert server.pid is None
        server.start()
        assert server.url == url
        with client(server) as redis:
            assert redis.get("kept") == "yes"


def test_stopping_ends_the_process_and_may_be_repeated(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    pid = server.pid
    assert pid is not None
    server.start()
    assert server.pid == pid
    server.stop()
    server.stop()
    assert not exists(pid)
    assert not (server.directory / "redis.sock").exists()


def test_a_directory_takes_one_server_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.embedded.redis_server._LOCK_SECONDS", 0.1)  # nobody is about to leave it
    with EmbeddedRedis(tmp_path / "redis") as first:
        with pytest.raises(RedisUnavailable, match="another embedded Redis") as caught:
            EmbeddedRedis(tmp_path / "redis").start()
        assert first.url in str(caught.value)
        with client(first) as redis:
            assert redis.ping()


def test_a_deep_or_odd_directory_works_too(tmp_path: Path) -> None:
    for directory in (tmp_path / ("deep" * 30), tmp_path / "a b?c#d%20"):
        with EmbeddedRedis(directory) as server, client(server) as redis:
            assert redis.ping()
            socket = Path(redis.connection_pool.connection_kwargs["path"])
            assert socket.exists()
        assert not socket.exists()


def test_a_server_that_cannot_start_shows_what_it_logged(tmp_path: Path) -> None:
    directory = tmp_path / "redis"
    directory.mkdir()
    (directory / "appendonlydir").write_text("in the way")
    with pytest.raises(RedisUnavailable) as caught:
        EmbeddedRedis(directory).start()
    assert "appendonlydir" in str(caught.value)
    assert "REDIS_URL" in str(caught.value)


def test_a_server_that_ended_by_itself_is_noticed(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        server.check()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.pid is None, description="the server has ended")
        with pytest.raises(RedisUnavailable, match="-9"):
            server.check()


def test_it_dies_with_a_killed_parent_and_frees_its_directory(tmp_path: Path) -> None:
    program = f"""
        import pathlib, time
        from deploy.embedded import EmbeddedRedis
        server = EmbeddedRedis(pathlib.Path({str(tmp_path / "redis")!r}))
        server.start()
        print(server.pid, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not exists(pid), description="the server has followed its parent")
    with EmbeddedRedis(tmp_path / "redis") as server, client(server) as redis:
        assert redis.ping()


def test_the_systems_server_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert redis_binary() == str(tmp_path / name)


def test_rq_works_over_the_socket(redis_url: str) -> None:
    with Redis.from_url(redis_url) as connection:
        queue = Queue("embedded", connection=connection, serializer=JSONSerializer)
        job = queue.enqueue("operator.add", 2, 3)
        worker = SimpleWorker([queue], connection=connection, serializer=JSONSerializer)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            worker.work(burst=True, logging_level="ERROR")
        finally:
            for number, handler in handlers.items():  # RQ leaves its own: pytest would no longer hear a Ctrl-C
                signal.signal(number, handler)
        result = job.latest_result()
        assert result is not None
        assert result.return_value == 5
