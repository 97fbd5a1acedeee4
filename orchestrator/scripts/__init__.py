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


def preload() -> None:
    """Read every script into this process: worth it before a fork, each child would read them anew."""
    for path in files(__package__).iterdir():
        if path.name.endswith(".lua"):
            _source(path.name.removesuffix(".lua"))


@cache
def _source(name: str) -> tuple[str, str]:
    text = files(__package__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
