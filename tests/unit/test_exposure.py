"""Who may listen where."""

from __future__ import annotations

from itertools import product

import httpx
import pytest

from orchestrator.errors import SettingsError
from orchestrator.exposure import check_exposure, is_host, shows_token


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "farm.example.org"])
def test_a_server_that_others_can_reach_needs_a_token(host: str) -> None:
    with pytest.raises(SettingsError, match="FARM_TERMINUS_TOKEN"):
        check_exposure(host, None, setting="FARM_TERMINUS_TOKEN")
    check_exposure(host, "secret", setting="FARM_TERMINUS_TOKEN")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_exposure(host, None, setting="FARM_TERMINUS_TOKEN")


@pytest.mark.parametrize("shown", ["Bearer s3cret", "bearer s3cret", "BEARER s3cret", "Bearer  s3cret "])
def test_a_bearer_token_is_shown_in_any_spelling_of_its_scheme(shown: str) -> None:
    assert shows_token(shown, "s3cret")


@pytest.mark.parametrize(
    "shown",
    ["", "s3cret", "Bearer", "Bearer ", "Bearers3cret", "Basic s3cret", "Bearer S3CRET", "Bearer s3cret x"],
)
def test_nothing_else_shows_it(shown: str) -> None:
    assert not shows_token(shown, "s3cret")


@pytest.mark.parametrize(
    "host", ["farm.example", "farm.example:443", "10.0.0.7:9400", "[::1]", "[::1]:9400", "a_b", "a.", "1.2.3"]
)
def test_a_host_is_a_name_or_an_address_with_or_without_a_port(host: str) -> None:
    assert is_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "[",
        "[::1",
        "::1",
        "a:b:c",
        "127.0.0.1:abc",
        "[::::]",
        "[1.2.3.4]",
        "\xe9",
        "a b",
        "a/b",
        "a:",
        "u@a",
        "256.1.1.1",
        "1.2.3.04:80",
    ],
)
def test_what_no_address_can_be_made_of_is_no_host(host: str) -> None:
    assert not is_host(host)


def test_of_every_host_an_address_can_be_made() -> None:
    """In the way that Gradio makes it, which fails where it cannot."""
    parts = (
        "",
        ".",
        "-",
        "_",
        "a",
        "xn--",
        "xn--a",
        "0",
        "1",
        "256",
        "0x7f",
        "999999999999",
        "1.2.3",
        "a" * 300,
        "[",
        "::",
        "]",
    )
    tried = [
        first + between + last + port
        for first, between, last in product(parts, parts, parts)
        for port in ("", ":99999")
    ]
    hosts = [host for host in tried if is_host(host)]
    assert len(hosts) > 1000
    for host in hosts:
        assert str(httpx.URL(f"http://{host}/").copy_with(query=None)), host
