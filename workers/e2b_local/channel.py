"""The host's end of an agent: ordinary socket pairs, each handed to the agent over its control socket.

No file or address leads to an agent, so nothing else on the host can reach one.
"""

import asyncio
import json
import socket
from typing import Any

_IDLE_CONNECTIONS = 4
_READ_BYTES = 262_144


class AgentGone(Exception):
    """The agent ended, or does not answer any more."""


class Connection:
    """One HTTP connection to an agent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def close(self) -> None:
        self.writer.transport.abort()


class Channel:
    """Opens connections to one agent, and keeps a few idle ones for the next request."""

    def __init__(self) -> None:
        self._control, self.agent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._control.settimeout(0)
        self._idle: list[Connection] = []

    async def begin(self, start: dict[str, Any]) -> None:
        """Tell the agent what it needs and wait until it serves; raises AgentGone."""
        self.agent_end.close()
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._control, json.dumps(start).encode() + b"\n")
            answer = await loop.sock_recv(self._control, 1)
        except OSError as error:
            raise AgentGone(str(error)) from error
        if not answer:
            raise AgentGone("the agent ended while it started")

    async def connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.transport.is_closing():
                return connection
            connection.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise AgentGone(str(error)) from error
        ours.settimeout(0)
        reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_BYTES)
        return Connection(reader, writer)

    def release(self, connection: Connection) -> None:
        """Give back a connection whose last exchange is complete."""
        if len(self._idle) < _IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        self.agent_end.close()
        self._control.close()
        while self._idle:
            self._idle.pop().close()
