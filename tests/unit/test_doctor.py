"""The doctor's judgements: each row, from what was seen, with what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import SecretStr

from deploy.doctor import Finding, Status, examine, healthy
from deploy.doctor.examine import examine_redis
from deploy.doctor.judge import (
    is_foreign,
    judge_capacity,
    judge_delay,
    judge_python,
    judge_redis,
    judge_versions,
)
from orchestrator.errors import AuthenticationFailed, NothingSent, ProviderError
from orchestrator.redis_address import without_password
from orchestrator.settings import Settings
from tests.support.bare_farm import farm_settings
from tests.support.fake_provider import FakeProvider

GOOD_INFO = {"redis_version": "7.0.15", "role": "master", "cluster_enabled": 0}
GOOD_CONFIG = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
GIB = 2**30


@dataclass
class Connections:
    """Connects to a fake provider, and remembers with what."""

    provider: FakeProvider = field(default_factory=FakeProvider)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def __call__(self, settings: Settings) -> FakeProvider:
        assert settings.e2b_api_key is not None
        self.asked.append((settings.e2b_api_key.get_secret_value(), settings.e2b_api_url))
        return self.provider


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


@pytest.mark.parametrize(("version", "status"), [((3, 10, 9), "fail"), ((3, 11, 0), "ok"), ((3, 14, 0), "fail")])
def test_python(version: tuple[int, ...], status: str) -> None:
    assert judge_python(version).status == status


def test_a_good_redis_has_nothing_to_mend() -> None:
    assert {finding.status for finding in judge_redis(GOOD_INFO, GOOD_CONFIG, [])} == {Status.OK}


@pytest.mark.parametrize(
    ("change", "word"),
    [({"redis_version": "5.0.1"}, "6.2"), ({"role": "slave"}, "primary"), ({"cluster_enabled": 1}, "single")],
)
def test_a_redis_that_cannot_serve_fails(change: Mapping[str, object], word: str) -> None:
    finding = named(judge_redis({**GOOD_INFO, **change}, GOOD_CONFIG, []), "Redis")
    assert finding.status is Status.FAIL
    assert word in finding.mend


@pytest.mark.parametrize(
    ("name", "value"), [("appendonly", "no"), ("appendfsync", "everysec"), ("maxmemory-policy", "allkeys-lru")]
)
def test_a_redis_that_may_lose_receipts_is_a_warning(name: str, value: str) -> None:
    finding = named(judge_redis(GOOD_INFO, {**GOOD_CONFIG, name: value}, []), "Redis durability")
    assert finding.status is Status.WARN
    assert finding.mend.startswith(f"CONFIG SET {name} ")


def test_a_redis_that_hides_its_configuration_is_a_warning() -> None:
    assert named(judge_redis(GOOD_INFO, None, []), "Redis durability").status is Status.WARN


def test_foreign_keys_are_a_warning() -> None:
    finding = named(judge_redis(GOOD_INFO, GOOD_CONFIG, ["session:1"]), "Redis keys")
    assert finding.status is Status.WARN
    assert "session:1" in finding.detail
    assert not is_foreign("rq:job:1")
    assert is_foreign("session:1")


def test_a_slow_redis_is_a_warning() -> None:
    assert judge_delay(0.001).status is Status.OK
    assert judge_delay(0.2).status is Status.WARN


def test_capacity_is_held_down_by_cores_memory_and_limit() -> None:
    assert "up to 8 workers (16 slots)" in judge_capacity(2, 20 * GIB, limit=20, local=True).detail
    assert "up to 2 workers" in judge_capacity(2, GIB, limit=20, local=True).detail
    assert "FARM_CONCURRENCY_LIMIT=4" in judge_capacity(2, 20 * GIB, limit=4, local=False).detail
    assert judge_capacity(2, GIB // 10, limit=20, local=True).status is Status.FAIL


def test_versions_leave_extras_and_other_platforms_out() -> None:
    wanted = ["redis>=6,<9", "torch>=2; extra == 'train'", "pywin32; sys_platform == 'win32'"]
    assert judge_versions(wanted, {"redis": "8.1.0"})[0].status is Status.OK
    assert judge_versions(wanted, {"redis": "9.0"})[0].status is Status.WARN
    assert judge_versions(wanted, {})[0].status is Status.FAIL


def test_every_finding_that_is_not_ok_says_what_to_do() -> None:
    found = [
        judge_python((3, 9, 0)),
        *judge_redis({**GOOD_INFO, "role": "slave"}, {}, ["x"]),
        judge_delay(1),
        judge_capacity(1, 0, limit=1, local=True),
        *judge_versions(["redis"], {}),
    ]
    assert all(finding.mend for finding in found if finding.status is not Status.OK)
    assert not healthy(found)


def test_a_password_is_never_shown() -> None:
    assert without_password("redis://me:secret@host:1/0") == "redis://me:***@host:1/0"
    assert without_password("redis://:p@ss@host") == "redis://:***@host"
    assert without_password("unix:///a.sock?db=0&password=secret") == "unix:///a.sock?db=0&password=***"
    finding = examine_redis(farm_settings("redis://me:secret@127.0.0.1:1/0"))[0]
    assert finding.status is Status.FAIL
    assert "secret" not in finding.detail


@pytest.mark.parametrize("url", ["http://nonsense", "redis://host:port/0", "unix:///no/such.sock"])
def test_a_wrong_redis_url_is_a_finding(url: str) -> None:
    finding = examine_redis(farm_settings(url))[0]
    assert finding.status is Status.FAIL
    assert "REDIS_URL" in finding.mend


def test_a_fit_host_with_a_cloud_key_needs_no_jails(redis_url: str) -> None:
    connect = Connections()
    settings = Settings(redis_url=redis_url, e2b_api_key=SecretStr("k"), _env_file=None)  # type: ignore[call-arg]
    findings = examine(settings, provider=connect, check_jail=lambda: "no namespaces")
    assert connect.asked == [("k", None)]
    assert healthy(findings)


def test_without_a_key_the_cloud_is_not_contacted_and_jails_are_needed(redis_url: str, tmp_path: Path) -> None:
    connect = Connections()
    settings = Settings(redis_url=redis_url, state_dir=tmp_path, _env_file=None)  # type: ignore[call-arg]
    findings = examine(settings, provider=connect, check_jail=lambda: "no namespaces")
    assert connect.asked == []
    assert "not contacted" in named(findings, "Provider").detail
    jails = named(findings, "Jails")
    assert (jails.status, jails.detail) == (Status.FAIL, "no namespaces")
    assert "E2B_API_KEY" in jails.mend


@pytest.mark.parametrize(
    ("error", "word"),
    [(AuthenticationFailed("401"), "E2B_API_KEY"), (NothingSent("refused"), "network")],
)
def test_a_provider_that_refuses_fails(redis_url: str, error: ProviderError, word: str) -> None:
    settings = Settings(redis_url=redis_url, e2b_api_key=SecretStr("k"), _env_file=None)  # type: ignore[call-arg]
    findings = examine(settings, provider=Connections(FakeProvider(refuse_list=error)), check_jail=lambda: None)
    assert named(findings, "Provider").status is Status.FAIL
    assert word in named(findings, "Provider").mend
    assert not healthy(findings)
