"""What a display may be shown: nothing that steers it, and nothing that nobody sees."""

from __future__ import annotations

import unicodedata

import pytest

from orchestrator.escaping import escape_control


@pytest.mark.parametrize(
    ("hidden", "code"),
    [
        *(("\x1b", "\\x1b"), ("\x00", "\\x00"), ("\r", "\\x0d"), ("\x7f", "\\x7f"), ("\x9b", "\\x9b")),
        *(("\u202e", "\\u202e"), ("\u2066", "\\u2066"), ("\u061c", "\\u061c"), ("\u2028", "\\u2028")),
        *(("\u200b", "\\u200b"), ("\u200d", "\\u200d"), ("\ufeff", "\\ufeff"), ("\ud800", "\\ud800")),
        *(("\u00ad", "\\xad"), ("\u180e", "\\u180e"), ("\u206a", "\\u206a"), ("\u206f", "\\u206f")),
        *(("\ufff9", "\\ufff9"), ("\ufffb", "\\ufffb"), ("\u2065", "\\u2065"), ("\u034f", "\\u034f")),
        *(("\U000e0001", "\\U000e0001"), ("\U000e0041", "\\U000e0041"), ("\U000e0100", "\\U000e0100")),
        *(("\u3164", "\\u3164"), ("\u115f", "\\u115f"), ("\uffa0", "\\uffa0"), ("\ufe0f", "\\ufe0f")),
        *(("\U0001d173", "\\U0001d173"), ("\U000110bd", "\\U000110bd")),
    ],
)
def test_what_steers_or_is_not_seen_is_spelled_out(hidden: str, code: str) -> None:
    assert escape_control(f"a{hidden}b") == f"a{code}b"


@pytest.mark.parametrize(
    "seen", ["", "plain ~ text\n\tindented", "é €, 漢字, हिन्दी, ไทย", "😀 ✅", "e\u0301", "a\u00a0b\u3000c"]
)
def test_what_is_seen_passes_as_it_is(seen: str) -> None:
    assert escape_control(seen) == seen


def test_of_all_characters_none_is_left_that_steers() -> None:
    shown = escape_control("".join(map(chr, range(0x110000))))
    left = {character for character in shown if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert left == {"\n", "\t"}
    shown.encode()
