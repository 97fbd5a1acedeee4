"""Running the installed `rollout-farm` as a user does: from a directory of its own, with nothing configured."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from tests.support import warm
from tests.support.processes import ROOT, Marked
from tests.support.waiting import wait_until

_LEASH_SECONDS = 5
"""For a child that was started in the very moment of a Ctrl-C: it notices by itself that its parent has ended."""

COMMAND = Path(sys.executable).parent / "rollout-farm"


@dataclass
class User:
    """A directory to work in, one for temporary files, and the commands that were started there."""

    home: Path
    temporary: Path
    started: list[Marked] = field(default_factory=list)

    def start(self, *arguments: str, **environment: str) -> Marked:
        """Start a command."""
        return self._start(arguments, environment, None)

    def _start(self, arguments: tuple[str, ...], environment: dict[str, str], template: warm.Template | None) -> Marked:
        given = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "REDIS_", "E2B_"))}
        cache = self.temporary.parent / "torch-cache"  # torch leaves it, on purpose, with temporary files by default
        given |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        given |= environment
        output = self.temporary.parent / f"output-{len(self.started)}"
        command = [str(COMMAND)] if template is None else template.farm_command
        process = Marked([*command, *arguments], environment=given, cwd=self.home, output=output, template=template)
        self.started.append(process)
        return process

    def run(
        self, *arguments: str, seconds: float = 60, template: warm.Template | None = None, **environment: str
    ) -> tuple[int, Marked]:
        """Run a command to its end: the installed one, or a warm one where other tests run the installed one."""
        process = self._start(arguments, environment, template)
        return process.wait(seconds), process

    def redis(self) -> Redis | None:
        """The server of the temporary stack, once it answers."""
        for socket in self.temporary.glob("farm-*/redis/redis.sock"):
            client = Redis(unix_socket_path=str(socket), decode_responses=True)
            try:
                client.ping()
            except RedisError:
                client.close()
            else:
                return client
        return None


@contextmanager
def user() -> Iterator[User]:
    """A user; checks at the end that no command left a process or a temporary file."""
    directory = Path(tempfile.mkdtemp(prefix="u-", dir="/tmp"))  # short: a Unix socket's path holds 108 bytes
    made = User(directory / "home", directory / "tmp")
    made.home.mkdir()
    made.temporary.mkdir()
    try:
        yield made
        for process in made.started:
            assert process.process.poll() is not None, "still running"
            wait_until(
                lambda process=process: process.alive() == [],  # type: ignore[misc]
                description=f"{process.process.args!r} has left no process behind",
                seconds=_LEASH_SECONDS,
            )
        assert (left := list(made.temporary.iterdir())) == [], left
    finally:
        for process in made.started:
            process.end()
        shutil.rmtree(directory)
