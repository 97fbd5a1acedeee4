"""What no proxy is asked for."""

from __future__ import annotations

import pytest

from deploy.proxies import exceptions_of


@pytest.mark.parametrize("environment", [{}, {"HTTP_PROXY": ""}, {"NO_PROXY": "example.org"}])
def test_an_environment_without_a_proxy_stays_as_it_is(environment: dict[str, str]) -> None:
    assert exceptions_of(environment) == {}


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "all_proxy"])
def test_no_proxy_is_asked_for_this_host(name: str) -> None:
    found = exceptions_of({name: "http://proxy:3128", "no_proxy": "example.org, 127.0.0.1"})
    assert found == dict.fromkeys(("NO_PROXY", "no_proxy"), "example.org,127.0.0.1,localhost,::1")
