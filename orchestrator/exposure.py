"""Who can reach a server of ours, and what it needs then: on loopback everybody on this host, elsewhere the token."""

from __future__ import annotations

import ipaddress

from orchestrator.errors import SettingsError

STRANGE_HOST = "without a token only requests to localhost or 127.0.0.1 are answered; set FARM_METRICS_TOKEN\n"


def is_loopback(host: str) -> bool:
    """Whether only this host can reach what listens on `host`; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names_this_host(host: str) -> bool:
    """Whether a request's Host header names loopback, with or without a port.

    One that does not comes from a web page whose own name was turned to loopback (DNS rebinding).
    """
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    return is_loopback(name.strip("[]"))


def check_exposure(host: str, token: str | None, *, setting: str) -> None:
    """Refuse to listen beyond loopback without a token; `setting` is the variable that gives one."""
    if token is None and not is_loopback(host):
        raise SettingsError(
            f"host {host}: others can reach what listens there; set {setting} to a secret of your own, "
            "or listen on 127.0.0.1"
        )
