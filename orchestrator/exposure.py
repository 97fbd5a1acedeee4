"""Who can reach a server of ours, and what it needs then: on loopback everybody on this host, elsewhere the token.

What always holds: whatever a header says, reading it is an answer and no error.
"""

from __future__ import annotations

import hmac
import ipaddress
import re

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


def is_host(text: str) -> bool:
    """Whether this is a name or an address, with or without a port, of which an address for a browser can be made."""
    found = re.fullmatch(r"(?:([a-z0-9]([a-z0-9._-]*[a-z0-9])?\.?)|\[([0-9a-f:.]+)\])(:[0-9]{1,5})?", text.lower())
    if found is None:
        return False
    try:
        if found[3] is not None:
            return ipaddress.ip_address(found[3]).version == 6
        # by the shape of it an address, which no name is allowed to have
        return not re.fullmatch(r"([0-9]+\.){3}[0-9]+", found[1]) or ipaddress.ip_address(found[1]).version == 4
    except ValueError:
        return False


def shows_token(authorization: str, token: str) -> bool:
    """Whether an Authorization header shows this bearer token; `bearer` in any spelling, as HTTP has it."""
    kind, _, given = authorization.partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def check_exposure(host: str, token: str | None, *, setting: str) -> None:
    """Refuse to listen beyond loopback without a token; `setting` is the variable that gives one."""
    if token is None and not is_loopback(host):
        raise SettingsError(
            f"host {host}: others can reach what listens there; set {setting} to a secret of your own, "
            "or listen on 127.0.0.1"
        )
