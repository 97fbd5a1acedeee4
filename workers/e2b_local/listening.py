"""How the service listens: connections that can be cut, and a port that can be deaf for a while.

While it is deaf the port stays bound without listening, so that the kernel refuses connections and nobody else can take
it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from workers.e2b_local.asgi import CONNECTION

logger = logging.getLogger(__name__)


class Connection(H11Protocol):
    """One client's connection, which is in the scope of each of its requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Put the connection where the application finds it."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, CONNECTION: transport}


class Listening(uvicorn.Server):
    """A server that can refuse connections for a while."""

    _outage: asyncio.Task[None] | None = None

    def refuse(self, seconds: float) -> None:
        """Refuse connections for so long; requests under way are answered, then their connections end."""
        if self._outage is not None and not self._outage.done():
            raise ValueError("outage_seconds: one is under way")
        addresses = [address for server in self.servers for address in _close(server)]
        try:
            held = [_hold(address) for address in addresses]
        except OSError:  # somebody took the port in between: a service that nobody can reach has no use
            self.should_exit = True
            raise
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self._outage = asyncio.get_running_loop().create_task(self._return(held, seconds))

    async def stop_listening(self) -> None:
        """For good; an outage ends with it."""
        for server in self.servers:
            server.close()
        if self._outage is not None:
            self._outage.cancel()
            await asyncio.gather(self._outage, return_exceptions=True)

    async def _return(self, held: list[socket.socket], seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            await uvicorn.Server.startup(self, held)
        except BaseException:
            for bound in held:
                bound.close()
            raise
        logger.info("listening again")


def _close(server: asyncio.Server) -> list[tuple[socket.AddressFamily, object]]:
    addresses = [(listening.family, listening.getsockname()) for listening in server.sockets]
    server.close()
    return addresses


def _hold(address: tuple[socket.AddressFamily, object]) -> socket.socket:
    family, name = address
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle's delay on
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(name)  # type: ignore[arg-type]
    return bound
