"""REDIS_URL: what its forms mean, and that a wrong one is said without showing what may be a secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import RedisUnavailable, SettingsError
from orchestrator.farm import open_farm
from orchestrator.redis_address import RedisAddress, parse_address, without_password
from orchestrator.settings import load_settings
from tests.support.bare_farm import farm_settings


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://10.0.0.5", RedisAddress(nodes=(("10.0.0.5", 6379),))),
        ("redis://[fd00::1]:7000/3", RedisAddress(nodes=(("fd00::1", 7000),), db=3)),
        ("redis://h?db=4", RedisAddress(nodes=(("h", 6379),), db=4)),
        (
            "redis://:a%2Fb@h/1",
            RedisAddress(nodes=(("h", 6379),), db=1, credentials={"password": "a/b"}),
        ),
        (
            "rediss://me:p%40ss@h:6380?ssl_check_hostname=false&ssl_ca_certs=/ca.pem",
            RedisAddress(
                tls=True,
                nodes=(("h", 6380),),
                credentials={"username": "me", "password": "p@ss"},
                tls_options={"ssl_check_hostname": False, "ssl_ca_certs": "/ca.pem"},
            ),
        ),
        (
            "unix:///run/a%20b.sock?db=2&password=x",
            RedisAddress(path="/run/a b.sock", db=2, credentials={"password": "x"}),
        ),
        (
            "rediss+sentinel://me:pw@a,b:26380/mymaster/2?sentinel_username=s&sentinel_password=t",
            RedisAddress(
                tls=True,
                nodes=(("a", 26379), ("b", 26380)),
                master="mymaster",
                db=2,
                credentials={"username": "me", "password": "pw"},
                sentinel_credentials={"username": "s", "password": "t"},
            ),
        ),
    ],
)
def test_each_form_is_read(url: str, address: RedisAddress) -> None:
    assert parse_address(url) == address
    assert "pw" not in repr(parse_address(url))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "is not set"),
        ("host:6379", "must begin with"),
        ("http://hunter2@host", "must begin with"),
        ("redis://:hunter2/x@host", "percent-encoded"),
        ("redis://:hunter2#x@host", "percent-encoded"),
        ("redis://:hunter2?x@host", "percent-encoded"),
        ("redis://:hunter2", "host:port"),
        ("redis://me:x@host:hunter2", "host:port"),
        ("redis://me:x@host:70000", "host:port"),
        ("redis://host/hunter2", "no number"),
        ("redis://host?db=hunter2", "no number"),
        ("redis://host/0#hunter2", "%23"),
        ("redis://host?retry=hunter2", "the option retry"),
        ("redis://host?hunter2=1", "an option"),
        ("redis://host?sentinel_password=hunter2", "the option sentinel_password"),
        ("rediss://host?ssl_cert_reqs=hunter2", "ssl_cert_reqs"),
        ("rediss://host?ssl_check_hostname=hunter2", "ssl_check_hostname"),
        ("unix://", "no socket"),
        ("redis+sentinel://host:26379", "names no primary"),
        ("redis+sentinel://:hunter2@[host/mymaster", "cannot be read"),
    ],
)
def test_a_wrong_one_says_what_to_correct_and_no_secret(url: str, says: str) -> None:
    with pytest.raises(RedisUnavailable, match="REDIS_URL") as told:
        open_farm(farm_settings(url))
    assert says in str(told.value)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://hunter2@host/0", "redis://***@host/0"),
        (
            "redis+sentinel://me:hunter2@a,b/m?sentinel_password=hunter2",
            "redis+sentinel://me:***@a,b/m?sentinel_password=***",
        ),
        ("at rediss://:a/b@h:1/0, then", "at rediss://:***@h:1/0, then"),
    ],
)
def test_secrets_in_urls_are_hidden(text: str, shown: str) -> None:
    assert without_password(text) == shown


def test_settings_do_not_show_the_url(tmp_path: Path) -> None:
    assert "hunter2" not in repr(farm_settings("redis://:hunter2@host"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"redis_ca_file": "/no/such.pem"}, "FARM_REDIS_CA_FILE"),
        ({"redis_url": "redis://h", "redis_ca_file": __file__}, "begin it with rediss://"),
        ({"redis_url": "rediss://h", "redis_key_file": __file__}, "FARM_REDIS_CERTIFICATE_FILE"),
    ],
)
def test_tls_files_that_cannot_be_meant_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load_settings(_env_file=None, **given)
