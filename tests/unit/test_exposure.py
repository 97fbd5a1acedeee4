"""Who may listen where."""

from __future__ import annotations

import pytest

from orchestrator.errors import SettingsError
from orchestrator.exposure import check_exposure


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "farm.example.org"])
def test_a_server_that_others_can_reach_needs_a_token(host: str) -> None:
    with pytest.raises(SettingsError, match="FARM_TERMINUS_TOKEN"):
        check_exposure(host, None, setting="FARM_TERMINUS_TOKEN")
    check_exposure(host, "secret", setting="FARM_TERMINUS_TOKEN")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_exposure(host, None, setting="FARM_TERMINUS_TOKEN")
