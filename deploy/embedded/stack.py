"""Stack: from settings to resolved settings, starting what is not configured and stopping all of it again.

    REDIS_URL      set: used as it is             unset: an EmbeddedRedis below state_dir
    E2B_API_KEY    set: the cloud, or e2b_api_url unset: LocalSandboxes below state_dir

While a stack with an embedded Redis runs, `stack.json` in its state_dir (mode 600: it holds the local key) says how to
reach it, so that other commands on this machine find it. Enter a Stack in a thread that outlives it (see tether.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import SecretStr
from redis.exceptions import RedisError

from deploy.embedded.redis_server import EmbeddedRedis
from deploy.embedded.sandboxes import LocalSandboxes
from deploy.embedded.temporary import TemporaryDirectory
from orchestrator.connection import client
from orchestrator.errors import RedisUnavailable, SettingsError
from orchestrator.settings import Settings

_DESCRIPTION = "stack.json"


class Stack:
    """What one machine needs to run episodes. `with Stack(settings) as stack:` then use `stack.settings`."""

    def __init__(self, settings: Settings, *, temporary: bool = False) -> None:
        self._given = settings
        self._temporary = temporary
        self._exits = contextlib.ExitStack()
        self._checks: list[Callable[[], None]] = []
        self._owner = os.getpid()
        self.settings = settings
        self.redis: EmbeddedRedis | None = None
        """The embedded server, None when REDIS_URL was set."""
        self.sandboxes: LocalSandboxes | None = None
        """The local service, None when E2B_API_KEY was set."""

    def start(self) -> Settings:
        """Start what is missing and return the settings that reach all of it."""
        self._owner = os.getpid()
        try:
            self.settings = self._resolve()
        except BaseException:
            self.stop()
            raise
        return self.settings

    def stop(self) -> None:
        """End everything this stack started, last first. Does nothing in a forked copy of this process."""
        if self._owner == os.getpid():
            self._checks.clear()
            self._exits.close()

    def check(self) -> None:
        """Raise the boundary's error when something of ours has ended by itself."""
        for check in self._checks:
            check()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _resolve(self) -> Settings:
        given = self._given
        needs_sandboxes = given.e2b_api_key is None
        if needs_sandboxes and given.e2b_api_url is not None:
            raise SettingsError("FARM_E2B_API_URL is set and E2B_API_KEY is not; set the key of that service")
        directory = given.state_dir.absolute()
        if self._temporary:
            temporary = TemporaryDirectory()
            self._exits.callback(temporary.remove)
            directory = temporary.path
        update: dict[str, object] = {"state_dir": directory}
        if given.redis_url is None:
            self.redis = self._exits.enter_context(EmbeddedRedis(directory / "redis"))
            self._checks.append(self.redis.check)
            update["redis_url"] = self.redis.url
        if needs_sandboxes:
            key = f"local-{secrets.token_hex(16)}"
            self.sandboxes = self._exits.enter_context(LocalSandboxes(directory, api_key=key))
            self._checks.append(self.sandboxes.check)
            update |= {"e2b_api_key": SecretStr(key), "e2b_api_url": self.sandboxes.url}
        resolved = given.model_copy(update=update)
        if self.redis is not None:
            description = directory / _DESCRIPTION
            self._exits.callback(description.unlink, missing_ok=True)
            _describe(description, resolved, local=self.sandboxes is not None)
        return resolved


def running_stack(settings: Settings) -> Settings | None:
    """Settings that reach the stack running in `state_dir`; None when REDIS_URL is set or none answers there."""
    if settings.redis_url is not None:
        return None
    try:
        found = json.loads((settings.state_dir / _DESCRIPTION).read_bytes())
        update: dict[str, object] = {"redis_url": found["redis_url"]}
        with client(settings.model_copy(update=update), patient=False, answer_seconds=2) as connection:
            connection.ping()
    except (OSError, ValueError, KeyError, RedisError, RedisUnavailable):
        return None
    if settings.e2b_api_key is None and found["e2b_api_key"] is not None:
        update |= {"e2b_api_key": SecretStr(found["e2b_api_key"]), "e2b_api_url": found["e2b_api_url"]}
    return settings.model_copy(update=update)


def _describe(path: Path, settings: Settings, *, local: bool) -> None:
    """Write how to reach the stack, with the local service's key but never the cloud's."""
    text = json.dumps(
        {
            "redis_url": settings.redis_url,
            "e2b_api_url": settings.e2b_api_url if local else None,
            "e2b_api_key": settings.e2b_api_key.get_secret_value() if local and settings.e2b_api_key else None,
        }
    )
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    fresh.replace(path)
