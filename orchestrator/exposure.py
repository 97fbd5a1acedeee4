"""Who can reach a server of ours, and what it needs then: on loopback everybody on this host, elsewhere the token."""

from __future__ import annotations

import ipaddress

from orchestrator.errors import SettingsError


def is_loopback(host: str) -> bool:
    """Whether only this host can reach what listens on `host`; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, token: str | None, *, setting: str) -> None:
    """Refuse to listen beyond loopback without a token; `setting` is the variable that gives one."""
    if token is None and not is_loopback(host):
        raise SettingsError(
            f"host {host}: others can reach what listens there; set {setting} to a secret of your own, "
            "or listen on 127.0.0.1"
        )
