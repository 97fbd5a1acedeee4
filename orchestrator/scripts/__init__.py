"""The atomic operations: one .lua file each, named by its verb, its header saying KEYS, ARGV and what it returns."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from redis import Redis


class Scripts:
    """Calls scripts by name on one connection; a server that has forgotten one (restart) is taught it again."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def run(self, name: str, keys: list[str], args: list[str | int | float]) -> Any:
        """Run one script; its header says what it takes and returns."""
        return self._redis.register_script(source(name))(keys=keys, args=args)


@cache
def source(name: str) -> str:
    """The text of one script."""
    return files(__package__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
