"""Which hosts are reached without the environment's proxy."""

from __future__ import annotations

import httpx
import pytest

from deploy.proxies import bypass_for_loopback


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:4000", "http://localhost:4000", "http://127.0.0.7", "http://[::1]:4"]
)
def test_loopback_is_exempt_under_both_names_beside_what_was(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"NO_PROXY": "a.example, localhost", "no_proxy": "b.example", "HTTP_PROXY": "http://proxy:3128"}
    bypass_for_loopback(url, environment)
    listed = environment["NO_PROXY"].split(",")
    assert environment["no_proxy"] == environment["NO_PROXY"]
    assert {"a.example", "b.example", "localhost", "127.0.0.1"} <= set(listed)
    assert len(set(listed)) == len(listed)
    monkeypatch.setenv("NO_PROXY", environment["NO_PROXY"])
    monkeypatch.setenv("no_proxy", environment["no_proxy"])
    httpx.Client().close()  # reads them, and fails over an entry that it does not understand
    before = dict(environment)
    bypass_for_loopback(url, environment)
    assert environment == before


@pytest.mark.parametrize("url", [None, "", "https://api.e2b.app", "http://10.0.0.7:4000"])
def test_other_hosts_change_nothing(url: str | None) -> None:
    environment = {"no_proxy": "b.example"}
    bypass_for_loopback(url, environment)
    assert environment == {"no_proxy": "b.example"}
