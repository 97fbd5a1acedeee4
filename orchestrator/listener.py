"""A server's listening socket: the one place that turns an address of the user's into a socket, or says what is wrong.

Always holds: the socket names its protocol, since asyncio turns Nagle's delay off only then (else 40 ms an answer on a
kept connection), and it listens already, so that nobody else can take the address any more.
"""

from __future__ import annotations

import errno
import socket

from orchestrator.errors import SettingsError

_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_AN_ADDRESS = "an address of this host, such as 127.0.0.1"


def listen(host: str, port: int) -> socket.socket:
    """Listen on this address; port 0 takes a free one. Raises SettingsError when it cannot be had."""
    try:
        return _listening(host, port)
    except UnicodeError:
        reason, instead = "no name of a host", _AN_ADDRESS
    except OSError as error:
        not_ours = isinstance(error, socket.gaierror) or error.errno in _NOT_OURS
        reason, instead = str(error.strerror), _AN_ADDRESS if not_ours else "another port"
    raise SettingsError(f"{_shown(host)}:{port} cannot be listened on ({reason}); choose {instead}")


def _listening(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def base_url(listener: socket.socket) -> str:
    """Where its server is reached over HTTP."""
    host, port = listener.getsockname()[:2]
    return f"http://{_shown(host)}:{port}"


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
