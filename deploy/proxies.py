"""Proxies that the environment names: what listens on this host is never asked through one.

E2B's SDK follows HTTP_PROXY for every address, loopback included, and a proxy cannot reach this host's own service.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from urllib.parse import urlsplit

from orchestrator.exposure import is_loopback

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Without brackets: httpx, which reads this wherever a client of it is made, fails over them."""
_NAMES = ("NO_PROXY", "no_proxy")
"""Readers differ in which of the two they prefer, so both are set to the same."""


def bypass_for_loopback(url: str | None, environment: MutableMapping[str, str]) -> None:
    """Where the URL's host is loopback, exempt it and its usual names from proxies; keeps what is exempt already."""
    host = urlsplit(url or "").hostname
    if host is None or not is_loopback(host):
        return
    exempt = [part.strip() for name in _NAMES for part in environment.get(name, "").split(",")]
    listed = ",".join(dict.fromkeys(part for part in (*exempt, host, *_LOOPBACK) if part))
    environment.update(dict.fromkeys(_NAMES, listed))
