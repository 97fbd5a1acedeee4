"""The data dictionary is complete: every key that can be built stands in it, with its life or a reason for none."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import orchestrator
from orchestrator import keys
from orchestrator.keys import FARM, PERSISTENT, Keys

TABLE = {
    cells[0]: cells[4]
    for line in (keys.__doc__ or "").splitlines()
    if line.startswith("| farm:")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
"""Key pattern as documented -> its life."""

MAILBOX = ("actions", "taken", "results", "inbox", "outbox")
CONSTANTS = [
    value for name, value in vars(Keys).items() if isinstance(value, str) and name.isupper() and "PREFIX" not in name
]
BUILT = [
    Keys.episode("e"),
    Keys.allocation("a"),
    Keys.receipt("e"),
    Keys.finished("run"),
    Keys.ends("run"),
    Keys.attempt("e"),
    Keys.budget("run"),
    Keys.wake("e"),
    Keys.creation("c"),
    Keys.worker("w"),
    Keys.trainer("t"),
    Keys.driver("run"),
    Keys.transcript("e"),
    *(Keys.mailbox("e", part) for part in MAILBOX),
]


def documented(key: str) -> list[str]:
    return [row for row in TABLE if re.fullmatch(re.sub(r"<\w+>", "[^:]+", row), key)]


@pytest.mark.parametrize("key", CONSTANTS + BUILT)
def test_every_key_stands_in_the_dictionary_once(key: str) -> None:
    assert len(documented(key)) == 1


def test_the_dictionary_names_no_key_that_cannot_be_built() -> None:
    assert {row for key in CONSTANTS + BUILT for row in documented(key)} == set(TABLE)


@pytest.mark.parametrize("key", CONSTANTS + BUILT)
def test_a_key_lives_for_ever_only_with_a_reason(key: str) -> None:
    [row] = documented(key)
    life = TABLE[row]
    persistent = any(fnmatchcase(key, pattern) for pattern in PERSISTENT)
    reasons = ("for ever", "empties itself", "pruned", "trimmed", "open: none", "with farm:waiters")
    assert persistent == any(reason in life for reason in reasons), life


def test_no_key_is_spelled_outside_the_dictionary() -> None:
    room = Path(orchestrator.__file__).parent
    for path in [*room.rglob("*.py"), *room.rglob("*.lua")]:
        if path != Path(keys.__file__):
            code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
            assert f'"{FARM}' not in code, path
            assert f"'{FARM}" not in code, path
