"""The documented rights of Redis users name every command that the code and its scripts send."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis

from tests.support.processes import ROOT

RULES = ROOT / "deploy" / "redis" / "users.acl"
ROOMS = ("orchestrator", "workers", "trainer", "deploy")
COMMAND_OF = {"delete": "del", "scan_iter": "scan"}
NO_COMMANDS = {"close", "execute", "from_pool", "from_url", "pipeline", "set_retry"}
NO_COMMANDS |= {"shutdown"}  # of a socket
NO_COMMANDS |= {"config_get"}  # the doctor asks, and does without an answer


def rights(user: str) -> set[str]:
    (line,) = (line for line in RULES.read_text().splitlines() if line.split()[1] == user)
    return {word[1:].split("|")[0] for word in line.split() if word.startswith("+")}


@pytest.mark.parametrize("user", ["farm", "farm-trainer"])
def test_scripts_call_nothing_else(user: str) -> None:
    scripts = list((ROOT / "orchestrator" / "scripts").glob("*.lua"))
    called = {name.lower() for path in scripts for name in re.findall(r"redis\.call\('(\w+)'", path.read_text())}
    assert len(called) > 20
    assert called - rights(user) == set()


def test_python_calls_nothing_else() -> None:
    called: dict[str, Path] = {}
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for name in re.findall(r"\b(?:_redis|redis|pipeline|connection|client)\.(\w+)\(", path.read_text()):
            if hasattr(redis.Redis, name) and name not in NO_COMMANDS:
                called.setdefault(COMMAND_OF.get(name, name), path)
    assert len(called) > 20
    assert {name: path.name for name, path in called.items() if name not in rights("farm")} == {}
