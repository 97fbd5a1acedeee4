"""A form's parts, as they arrive: never more than a boundary's length is held back."""

from __future__ import annotations

from .http import Failure

# Seen by type checkers only: importing typing would cost every sandbox 5 ms of start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_PART_HEAD_BYTES = 16_384


class Multipart:
    """Calls `open_part(name, filename)` for each part and, if that wants it, `write` for its data."""

    def __init__(
        self, content_type: str, open_part: Callable[[str, str], bool], write: Callable[[bytes], None]
    ) -> None:
        boundary = _parameter(content_type, "boundary")
        if not boundary:
            raise Failure(400, 400, "multipart body without a boundary")
        self._delimiter = b"\r\n--" + boundary.encode("latin-1")
        # The first delimiter has no line before it.
        self._buffer = bytearray(b"\r\n")
        self._open_part = open_part
        self._write = write
        self._wanted = False
        self._in_head = False

    def feed(self, chunk: bytes) -> None:
        self._buffer += chunk
        while self._take_head() if self._in_head else self._take_data():
            pass

    def _take_data(self) -> bool:
        """Pass on data up to the next delimiter; whether one was found."""
        end = self._buffer.find(self._delimiter)
        safe = end if end >= 0 else max(0, len(self._buffer) - len(self._delimiter))
        if self._wanted and safe:
            self._write(bytes(self._buffer[:safe]))
        del self._buffer[:safe]
        if end < 0:
            return False
        del self._buffer[: len(self._delimiter)]
        self._in_head = True
        return True

    def _take_head(self) -> bool:
        if self._buffer.startswith(b"--"):  # the last delimiter
            self._wanted = False
            self._in_head = False
            self._buffer.clear()
            return False
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _PART_HEAD_BYTES:
                raise Failure(400, 400, "multipart head too long")
            return False
        head = self._buffer[:end].decode("utf-8", "surrogateescape")
        del self._buffer[: end + 4]
        name = filename = ""
        for line in head.split("\r\n"):
            if line.lower().startswith("content-disposition:"):
                name, filename = _parameter(line, "name"), _parameter(line, "filename")
        self._wanted = self._open_part(name, _unescape(filename))
        self._in_head = False
        return True


def _parameter(line: str, name: str) -> str:
    """The value of `name=` in a header line, with or without quotes."""
    _, _, rest = line.partition(f"; {name}=")
    return rest[1:].partition('"')[0] if rest.startswith('"') else rest.partition(";")[0].strip()


def _unescape(text: str) -> str:
    """What browsers and httpx escape in a file name, and no more: `%` itself is left as it is."""
    for code in (*range(32), ord('"')):
        text = text.replace(f"%{code:02X}", chr(code))
    return text.replace("\\\\", "\\")
