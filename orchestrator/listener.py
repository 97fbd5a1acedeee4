"""A server's listening socket: the one place that turns an address of the user's into a socket, or says what is wrong.

Always holds: what it accepts inherits that Nagle's delay is off (asyncio leaves it on here: 40 ms an answer on a kept
connection), and it listens already, so that nobody else can take the address any more.
"""

from __future__ import annotations

import errno
import os
import socket

from orchestrator.errors import SettingsError

_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_AN_ADDRESS = "an address of this host, such as 127.0.0.1"


def listen(host: str, port: int) -> socket.socket:
    """Listen on this address; port 0 takes a free one. Raises SettingsError when it cannot be had."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0  # below 0: the resolver's, of a name that it does not know
        # not the error's own text: create_server names the address there once more
        reason = os.strerror(number) if number > 0 else "no name of a host"
        instead = "another port" if number > 0 and number not in _NOT_OURS else _AN_ADDRESS
    raise SettingsError(f"{_shown(host)}:{port} cannot be listened on ({reason}); choose {instead}")


def base_url(listener: socket.socket) -> str:
    """Where its server is reached over HTTP."""
    host, port = listener.getsockname()[:2]
    return f"http://{_shown(host)}:{port}"


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
