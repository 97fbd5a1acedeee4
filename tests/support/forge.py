"""Functions of the tests in warm processes of their own: they start in milliseconds, and whoever kills one kills it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tests.support import warm
from tests.support.warm import WarmProcess

_STOP_SECONDS = 30.0


@contextmanager
def forged(main: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, WarmProcess]]:
    """`main(tell, *arguments)` in a process of its own: the first thing it told, and the process, which is ended.

    All of it is pickled; so `main` stands in a module, and nothing of this process is there.
    """
    command = [sys.executable, "-m", __name__]
    reading, their_told = os.pipe()
    their_call, writing = os.pipe()
    with os.fdopen(reading, "rb") as told, os.fdopen(their_told, "wb") as stdout, os.fdopen(their_call, "rb") as stdin:
        with os.fdopen(writing, "wb") as call, os.fdopen(os.dup(2), "wb") as stderr:
            process = warm.farm().start(
                command, env=os.environ, cwd=Path.cwd(), stdin=stdin, stdout=stdout, stderr=stderr
            )
            pickle.dump((main, arguments), call)
        stdout.close()
        try:
            yield _first(told, main), process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _first(told: BinaryIO, main: Callable[..., None]) -> Any:
    try:
        return pickle.load(told)
    except EOFError:
        raise AssertionError(f"{main.__name__} has told nothing before its end") from None


def _run() -> None:
    main, arguments = pickle.load(sys.stdin.buffer)
    told = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what is printed is for who reads the suite's output
    main(lambda what: told.write(pickle.dumps(what)), *arguments)


if __name__ == "__main__":
    _run()
