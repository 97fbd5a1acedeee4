"""A loopback port in front of another, from which every answer comes late, as over a bad network."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def slow_port(port: int, *, seconds: float) -> Iterator[int]:
    """A port that leads to `port`; what comes back is held for `seconds`. Its connections end with the block."""
    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pump(source: socket.socket, target: socket.socket, late: float) -> None:
            with contextlib.suppress(OSError):
                while received := source.recv(65_536):
                    time.sleep(late)
                    target.sendall(received)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    far = socket.create_connection(("127.0.0.1", port))
                    opened.extend((near, far))
                    for source, target, late in ((near, far, 0.0), (far, near, seconds)):
                        threading.Thread(target=pump, args=(source, target, late), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in opened:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
