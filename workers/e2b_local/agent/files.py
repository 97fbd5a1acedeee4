"""Whole files in and out: GET and POST /files.

Only regular files are read or written: a pipe or a device in a file's place is refused, and cannot make the agent wait.
"""

# Importing pathlib would cost every sandbox 8 ms of start.
# ruff: noqa: PTH103, PTH112, PTH119, PTH120

from __future__ import annotations

import errno
import os
import pwd
import stat

from . import entries, paths
from .http import Exchange, Failure
from .multipart import Multipart

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_CHUNK_BYTES = 65_536
_METADATA_HEADER = "x-metadata-"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Download:
    """Sends a file piece by piece, each when the last has left."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._file: int | None = None
        self._left: int | None = None
        self._squeeze: Any = None

    def data(self, chunk: bytes) -> None:
        """A download has no body."""

    def end(self) -> None:
        exchange = self._exchange
        path = paths.resolve(exchange.query.get("path", ""), _user(exchange))
        self._file = _open_regular(path, os.O_RDONLY)
        size = os.fstat(self._file).st_size
        packed = exchange.headers.get("accept-encoding") == "gzip"
        if packed:
            import zlib  # few sandboxes need it

            self._squeeze = zlib.compressobj(1, zlib.DEFLATED, 31)
        elif size:  # files of /proc claim to be empty
            self._left = size
        headers = "content-encoding: gzip\r\n" if packed else ""
        exchange.start(200, content_type="application/octet-stream", length=self._left, headers=headers)
        exchange.on_drain = self._send
        self._send()

    def closed(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _send(self) -> None:
        while self._file is not None and not self._exchange.congested:
            try:
                chunk = os.read(self._file, min(_CHUNK_BYTES, _CHUNK_BYTES if self._left is None else self._left))
            except OSError:
                self._exchange.abort()
                return
            if self._left is not None:
                self._left -= len(chunk)
            if chunk:
                self._exchange.send(self._squeeze.compress(chunk) if self._squeeze else chunk)
            if self._left == 0 or (not chunk and self._left is None):
                if self._squeeze:
                    self._exchange.send(self._squeeze.flush())
                self._exchange.on_drain = None
                self._exchange.finish()
            elif not chunk:  # it was cut while we were sending it
                self._exchange.abort()


class Upload:
    """Takes one file as the body, or several as a form."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._user = _user(exchange)
        self._metadata = _metadata(exchange.headers)
        self._written: list[dict[str, Any]] = []
        self._file: int | None = None
        self._expand: Any = None
        self._parts: Multipart | None = None
        kind = exchange.headers.get("content-type", "")
        if kind.startswith("application/octet-stream"):
            self._take_raw()
        elif kind.startswith("multipart/"):
            self._parts = Multipart(kind, self._open_part, self._write)
        else:
            raise Failure(400, 400, f"unsupported content type: {kind}")

    def data(self, chunk: bytes) -> None:
        if self._parts:
            self._parts.feed(chunk)
        else:
            self._write(self._expand.decompress(chunk, _CHUNK_BYTES) if self._expand else chunk)
            while self._expand and self._expand.unconsumed_tail:
                self._write(self._expand.decompress(self._expand.unconsumed_tail, _CHUNK_BYTES))

    def end(self) -> None:
        if self._expand:
            self._write(self._expand.flush())
        self._close()
        self._exchange.respond_json(self._written)

    def closed(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _take_raw(self) -> None:
        path = self._exchange.query.get("path")
        if path is None:
            raise Failure(400, 400, "path query parameter is required for raw body upload")
        if self._exchange.headers.get("content-encoding") == "gzip":
            import zlib  # few sandboxes need it

            self._expand = zlib.decompressobj(31)
        self._open(path)

    def _open_part(self, name: str, filename: str) -> bool:
        if name != "file":
            return False
        self._close()
        self._open(self._exchange.query.get("path") or filename)
        return True

    def _open(self, name: str) -> None:
        path = paths.resolve(name, self._user)
        if any(entry["path"] == path for entry in self._written):
            again = f"you cannot upload multiple files to the same path '{path}' in one upload request"
            raise Failure(400, 400, again)

        def create() -> None:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._file = _open_regular(path, os.O_WRONLY | os.O_CREAT)
            os.ftruncate(self._file, 0)
            entries.set_attributes(path, self._metadata)

        _store(create)
        entry = {"path": path, "name": os.path.basename(path), "type": "file"}
        self._written.append({**entry, **({"metadata": self._metadata} if self._metadata else {})})

    def _write(self, data: bytes) -> None:
        def write() -> None:
            left = memoryview(data)
            while left and self._file is not None:
                left = left[os.write(self._file, left) :]

        _store(write)

    def _close(self) -> None:
        self.closed()


def _user(exchange: Exchange) -> pwd.struct_passwd:
    return paths.user_named(exchange.query.get("username") or "user")


def _store(action: Callable[[], None]) -> None:
    """Do something that may find the disk full."""
    try:
        action()
    except OSError as error:
        full = error.errno in _FULL
        raise Failure(507 if full else 500, 507 if full else 500, os.strerror(error.errno or 0)) from None


def _open_regular(path: str, flags: int) -> int:
    if os.path.isdir(path):
        raise Failure(400, 400, f"path '{path}' is a directory")
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except (FileNotFoundError, NotADirectoryError):
        raise Failure(404, 404, f"path '{path}' does not exist") from None
    except PermissionError:
        raise Failure(403, 403, f"path '{path}' is not permitted") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Failure(400, 400, f"path '{path}' is not a regular file")
    return fd


def _metadata(headers: dict[str, str]) -> dict[str, str]:
    names = [name for name in headers if name.startswith(_METADATA_HEADER)]
    found = {name[len(_METADATA_HEADER) :]: headers[name] for name in names}
    if not all(
        character.isascii() and character.isprintable() for text in found.items() for character in "".join(text)
    ):
        raise Failure(400, 400, "metadata must be printable ASCII")
    return found
