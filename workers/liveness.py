"""Whether a server of ours still answers, found out by whoever must never wait for it.

What always holds: no call blocks; any byte of an answer is a sign of life; only time in which we ourselves ran counts
against the server, so that a machine that stood still or was too busy for both has it killed for nothing.
"""

from __future__ import annotations

import errno
import os
import socket

_ASK_SECONDS = 5.0
"""From an answer to the next question."""

_TURN_SECONDS = 0.5
"""The most that counts between two looks; they are 50 ms apart where the machine keeps up."""

_OF_THE_SERVER = (0, errno.EINPROGRESS, errno.EAGAIN, errno.ECONNREFUSED)
"""What an attempt to connect comes to where it says something of the server: `send` tells what."""

_QUESTION = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


class Liveness:
    """Asks the HTTP server at `address` again and again: call `look` often."""

    def __init__(self, address: tuple[str, int], *, patience_seconds: float) -> None:
        self._address = address
        self._patience = patience_seconds
        self._asked: socket.socket | None = None
        self._sent = False
        self._looked: float | None = None
        self._silent = 0.0
        """Seconds for which there was an open question and no answer, as far as they count."""
        self._next = 0.0

    def look(self, now: float) -> bool:
        """False once the server has answered nothing for the whole of its patience; `now` is a monotonic clock's."""
        passed = 0.0 if self._looked is None else min(now - self._looked, _TURN_SECONDS)
        self._looked = now
        if self._asked is None:
            if now < self._next:
                return True
            try:
                self._asked = self._ask()
            except OSError:  # no descriptor or port is left for us: the server was asked nothing
                return True
        self._silent += passed
        try:
            if self._exchange():
                self.forget()
                self._next = now + _ASK_SECONDS
        except BlockingIOError:
            pass
        except OSError:
            self._drop()
        return self._silent <= self._patience

    def forget(self) -> None:
        """Begin anew, with another server, or without any: in a fork, which must not hold the question open."""
        self._drop()
        self._silent = self._next = 0.0

    def _ask(self) -> socket.socket:
        """A connection on its way; raises OSError when there can be none from here."""
        asked = socket.socket()
        asked.settimeout(0)
        code = asked.connect_ex(self._address)
        if code not in _OF_THE_SERVER:
            asked.close()
            raise OSError(code, os.strerror(code))
        return asked

    def _exchange(self) -> bool:
        """Do the next step of a question; whether it is answered. Raises OSError when the connection broke."""
        assert self._asked is not None
        if not self._sent:
            self._asked.send(_QUESTION)
            self._sent = True
        if not self._asked.recv(1024):
            raise ConnectionResetError
        return True

    def _drop(self) -> None:
        if self._asked is not None:
            self._asked.close()
        self._asked, self._sent = None, False
