"""Fixtures of the whole suite. No test sees the developer's own Redis or keys, and in CI no test may be skipped."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator

import pytest
from redis import Redis

from tests.support.redis_server import leaks, running_redis


def pytest_configure() -> None:
    """Forget every setting of the surroundings: tests name what they need."""
    gc.set_threshold(50_000)  # what is imported stays: looking through it took a sixth of the collection
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell in whose background we run
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in list(os.environ):
        if name == "REDIS_URL" or name.startswith(("FARM_", "E2B_")):
            del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a missing part fails."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where every part must be there: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself."""
    report = yield
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where every part must be there: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One real server for the session."""
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(autouse=True)
def _clean_redis(request: pytest.FixtureRequest) -> Iterator[None]:
    """For every test that uses the session's server, however: empty before, without leaks after."""
    if "redis_url" not in request.fixturenames:
        yield
        return
    with Redis.from_url(request.getfixturevalue("redis_url"), decode_responses=True) as client:
        client.flushall()
        yield
        if found := leaks(client):
            pytest.fail("left in Redis:\n" + "\n".join(found), pytrace=False)


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """A client of the session's server, whose database is empty; answers are text."""
    with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client
