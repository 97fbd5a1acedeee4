"""The atomic operations: one .lua file each, named by its verb, its header saying KEYS, ARGV and what it returns."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError


class Scripts:
    """Calls scripts by name on one connection; a server that has forgotten one (restart) is taught it again."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def run(self, name: str, keys: list[str], args: list[str | int | float]) -> Any:
        """Run one script; its header says what it takes and returns."""
        text, sha = _source(name)
        try:
            return self._redis.evalsha(sha, len(keys), *keys, *args)
        except NoScriptError:
            return self._redis.eval(text, len(keys), *keys, *args)  # EVAL also leaves it known to the server

    def run_after_pop(
        self, inbox: str, timeout_seconds: float, name: str, keys: list[str], args: list[str | int | float]
    ) -> tuple[str | None, Any]:
        """Block on a list, then run a script, in one round trip: (what was popped or None, the script's answer).

        The server runs the script as soon as the list gives something or the time is over, without asking us again.
        """
        text, sha = _source(name)
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.blpop([inbox], timeout=timeout_seconds)
        pipeline.evalsha(sha, len(keys), *keys, *args)
        popped, answer = pipeline.execute(raise_on_error=False)
        if isinstance(popped, Exception):
            raise popped
        if isinstance(answer, NoScriptError):
            answer = self._redis.eval(text, len(keys), *keys, *args)
        if isinstance(answer, Exception):
            raise answer
        return (popped[1] if popped else None), answer


def preload() -> None:
    """Read every script into this process: worth it before a fork, each child would read them anew."""
    for path in files(__package__).iterdir():
        if path.name.endswith(".lua"):
            _source(path.name.removesuffix(".lua"))


@cache
def _source(name: str) -> tuple[str, str]:
    text = files(__package__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
