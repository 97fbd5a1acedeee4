"""HTTP proxies of the environment: what a command of ours, and all that it starts, never asks one for.

The local sandbox service and Terminus servers listen on loopback, where a proxy would look for them on its own host.
"""

from __future__ import annotations

from collections.abc import Mapping

_HERE = ("127.0.0.1", "localhost", "::1")  # no brackets: httpx fails over them
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_EXCEPT = ("NO_PROXY", "no_proxy")


def exceptions_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep this host's own addresses from the environment's proxies; none where it names none."""
    if not any(value for name, value in environment.items() if name.lower() in _PROXIES):
        return {}
    given = [host.strip() for name in _EXCEPT for host in environment.get(name, "").split(",")]
    return dict.fromkeys(_EXCEPT, ",".join(dict.fromkeys([*filter(None, given), *_HERE])))
