"""Processes that start in milliseconds: forked from one that has imported what Terminus servers and clients need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0

_FORGE = multiprocessing.get_context("forkserver")
_FORGE.set_forkserver_preload(
    [
        "workers.terminus.server",  # first: it keeps openenv.core from importing gradio
        "workers.sandboxes.provider",
        "openenv.core.generic_client",
        "openenv.core.mcp_client",
    ]
)


@contextmanager
def forged(main: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, BaseProcess]]:
    """`main(tell, *arguments)` in a process of its own: the first thing it told, and the process, which is ended."""
    ours, theirs = _FORGE.Pipe(duplex=False)
    process = _FORGE.Process(target=_run, args=(main, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(_START_SECONDS), f"{main.__name__} has told nothing"
        yield ours.recv(), process
    finally:
        process.terminate()
        process.join(_STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()
        process.close()


def _run(main: Callable[..., None], told: Connection, *arguments: Any) -> None:
    main(told.send, *arguments)
