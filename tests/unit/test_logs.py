"""What an operator reads in the log: the fields of a record too, and nothing that steers a terminal."""

from __future__ import annotations

import logging

import pytest

from deploy.logs import Lines


def line(message: str, *args: object, **extra: object) -> str:
    """One record as the command logs it."""
    record = logging.getLogger("workers.allocator").makeRecord(
        "workers.allocator", logging.ERROR, __file__, 1, message, args, None, extra=extra
    )
    return Lines().format(record)


def test_the_fields_of_a_record_are_shown() -> None:
    shown = line("cleanup unresolved", sandbox="id3a55", error="500")
    assert shown.endswith("ERROR workers.allocator cleanup unresolved sandbox=id3a55 error=500")


def test_a_record_without_fields_is_its_message() -> None:
    assert line("Redis is away: %s", "refused").endswith("workers.allocator Redis is away: refused")


@pytest.mark.parametrize("hostile", ["a\x1b[2Jb", "a\nERROR forged", "a\rb"])
def test_nothing_in_a_line_steers(hostile: str) -> None:
    shown = line("ended: %s", hostile, detail=hostile)
    assert not set(shown) & set("\x1b\n\r")
