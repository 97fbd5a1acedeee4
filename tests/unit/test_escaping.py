"""What a display may be shown: nothing that steers it, and nothing that nobody sees."""

from __future__ import annotations

import sys
import unicodedata
from types import FrameType

import pytest

from orchestrator.escaping import escape_control

IGNORABLE = {
    *(0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), *range(0x200B, 0x2010)),
    *(*range(0x202A, 0x202F), *range(0x2060, 0x2070), 0x3164, *range(0xFE00, 0xFE10), 0xFEFF, 0xFFA0),
    *(*range(0xFFF0, 0xFFF9), *range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B), *range(0xE0000, 0xE1000)),
}
"""Default_Ignorable_Code_Point in Unicode's DerivedCoreProperties.txt, versions 14 to 16."""


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


def test_of_all_characters_exactly_those_are_spelled_out_that_steer_or_are_not_seen() -> None:
    steering = {code for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    asked = [code for code in range(0x110000) if chr(code) != " "]
    shown = escape_control(" ".join(map(chr, asked)))
    spelled = {code for code, answer in zip(asked, shown.split(" "), strict=True) if answer != chr(code)}
    assert spelled == (steering | IGNORABLE) - {ord("\t"), ord("\n")}
    shown.encode()


def test_what_passes_is_looked_at_in_one_piece() -> None:
    """Each character by itself took a drawing of a transcript in Chinese, Hindi or Thai a hundred times as long."""
    text, called = "漢字, हिन्दी, ไทย, 😀\n" * 100 + "\u200b", 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal called
        called += event == "call"

    escape_control(text)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        escape_control(text)
    finally:
        sys.setprofile(before)
    assert called < 10
