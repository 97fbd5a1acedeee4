"""The atomic operations: one .lua file each, named by its verb, its header saying KEYS, ARGV and what it returns.

A file whose name begins with an underscore is no operation: a script whose header says `Needs: <name>` is sent with
`_<name>.lua` (and what that needs itself) before it. Before all that stands `now_ms`, by which scripts ask for the
time: Redis's, or that of a simulation, so that the very same scripts can be run through hours in seconds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError

_REDIS_TIME = """local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
"""

_GIVEN_TIME = "local function now_ms() return tonumber(ARGV[#ARGV]) end\n"
"""The clock of a simulation travels as one more argument, the last."""


class Scripts:
    """Calls scripts by name on one connection; a server that has forgotten one (restart) is taught it again.

    `clock_ms` is for simulations: every script sees its time.
    """

    def __init__(self, redis: Redis, *, clock_ms: Callable[[], int] | None = None) -> None:
        self._redis = redis
        self._clock_ms = clock_ms

    def run(self, name: str, keys: list[str], args: list[str | int | float]) -> Any:
        """Run one script; its header says what it takes and returns."""
        text, sha, timed = _source(name, given_time=self._clock_ms is not None)
        if timed and self._clock_ms is not None:
            args = [*args, self._clock_ms()]
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
        text, sha, _ = _source(name, given_time=False)
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
        if path.name.endswith(".lua") and not path.name.startswith("_"):
            _source(path.name.removesuffix(".lua"), given_time=False)


@cache
def _source(name: str, *, given_time: bool) -> tuple[str, str, bool]:
    """What is sent, its hash, and whether it asks `now_ms` for the time."""
    text = "".join(_with_needed(name).values())
    if timed := "now_ms()" in text:
        text = (_GIVEN_TIME if given_time else _REDIS_TIME) + text
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), timed


def _with_needed(name: str) -> dict[str, str]:
    """A script's text after those of all that it needs, by name; each once, what it needs itself before it."""
    text = _read(name)
    found: dict[str, str] = {}
    for part in re.findall(r"(?<!\")\bNeeds: (\w+)", "".join(re.findall(r"^--.*$", text, re.MULTILINE))):
        found |= {needed: body for needed, body in _with_needed(f"_{part}").items() if needed not in found}
    return {**found, name: text}


def _read(name: str) -> str:
    return files(__package__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
